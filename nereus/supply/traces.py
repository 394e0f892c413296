"""Files that say which devices there are over time, as published and as written by hand.

| file | content |
|---|---|
| `.csv` | header `time_s,devices`; seconds since the start and a count |
| `.csv` | `ms,add,node7` and `ms,remove,node7` (Bamboo's spot traces); a node is one device |
| `.json` | a list of `{"time": minutes, "size": devices}` (Tenplex's schedules: each size lasts so many minutes) |
| `.json` | `{"metadata": {"gap_seconds": s}, "data": [counts]}` (spot availability traces) |

Where a file gives counts, `draw_devices` chooses by seed who leaves. Every problem is a DataError with file and line.
"""

import csv
import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any, TypeGuard

from nereus.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """From `time_s` on, these devices (ascending) are there."""

    time_s: float
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTrace:
    """Changes in ascending time, the first at 0; the last lasts for ever."""

    changes: tuple[Change, ...]

    @property
    def device_ids(self) -> tuple[int, ...]:
        """Every device that is ever there, ascending: what a cluster must be able to start."""
        return tuple(sorted({device for change in self.changes for device in change.devices}))


def read_trace(path: Path, *, seed: int = 0) -> DeviceTrace:
    """The trace of a file; `seed` draws who leaves where it gives counts only."""
    if not path.is_file():
        raise DataError(f"supply trace {path}: not found")
    text = path.read_text(encoding="utf-8-sig")
    match path.suffix.lower():
        case ".csv":
            return _from_csv(text, path, seed)
        case ".json":
            return _from_json(text, path, seed)
        case suffix:
            raise DataError(f"supply trace {path}: {suffix or 'no suffix'} is not read; give .csv or .json")


def trace_of_counts(counts: list[tuple[float, int]], *, seed: int) -> DeviceTrace:
    """The trace of (time_s, count) rows in ascending time; before the first row its count holds."""
    devices = draw_devices([count for _, count in counts], seed=seed)
    changes = [Change(time_s, ids) for (time_s, _), ids in zip(counts, devices, strict=True)]
    changes[0] = Change(0.0, changes[0].devices)
    return DeviceTrace(tuple(c for i, c in enumerate(changes) if i == 0 or c.devices != changes[i - 1].devices))


def draw_devices(counts: list[int], *, seed: int) -> list[tuple[int, ...]]:
    """Device ids for a sequence of counts: the lowest free ids come, and who leaves is drawn by seed."""
    random, here, result = Random(seed), list[int](), list[tuple[int, ...]]()
    for count in counts:
        while len(here) > count:
            here.remove(random.choice(here))
        free = [device for device in range(max(counts)) if device not in here]
        here = sorted(here + free[: count - len(here)])
        result.append(tuple(here))
    return result


def _from_csv(text: str, path: Path, seed: int) -> DeviceTrace:
    rows = [(line, row) for line, row in enumerate(csv.reader(text.splitlines()), start=1) if row and any(row)]
    if not rows:
        raise DataError(f"supply trace {path}: empty; give a header time_s,devices and rows")
    if [cell.strip() for cell in rows[0][1]] == ["time_s", "devices"]:
        counts = [(_number(row, 0, path, line), _count(row, path, line)) for line, row in rows[1:]]
        _check_times([(line, time_s) for (line, _), (time_s, _) in zip(rows[1:], counts, strict=True)], path)
        return trace_of_counts(counts, seed=seed)
    if len(rows[0][1]) == 3:
        return _from_names(rows, path)
    raise DataError(f"supply trace {path}, line {rows[0][0]}: expected the header time_s,devices, found {rows[0][1]}")


def _from_names(rows: list[tuple[int, list[str]]], path: Path) -> DeviceTrace:
    """Bamboo's rows; devices are numbered in the order in which their nodes first come."""
    ids: dict[str, int] = {}
    here: set[int] = set()
    changes: list[Change] = []
    _check_times([(line, _number(row, 0, path, line)) for line, row in rows], path)
    for line, row in rows:
        if len(row) != 3 or row[1].strip() not in ("add", "remove"):
            raise DataError(f"supply trace {path}, line {line}: expected ms,add|remove,node, found {row}")
        time_s, name = _number(row, 0, path, line) / 1000, row[2].strip()
        if row[1].strip() == "add":
            here.add(ids.setdefault(name, len(ids)))
        elif name not in ids or ids[name] not in here:
            raise DataError(f"supply trace {path}, line {line}: removes {name}, which is not there")
        else:
            here.remove(ids[name])
        if changes and changes[-1].time_s == time_s:
            changes.pop()
        changes.append(Change(time_s, tuple(sorted(here))))
    changes[0] = Change(0.0, changes[0].devices)
    return DeviceTrace(tuple(changes))


def _from_json(text: str, path: Path, seed: int) -> DeviceTrace:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"supply trace {path}, line {error.lineno}: not JSON ({error.msg})") from None
    if isinstance(document, list):
        return trace_of_counts(_tenplex(document, path), seed=seed)
    gap_s = document.get("metadata", {}).get("gap_seconds") if isinstance(document, dict) else None
    if not _is_number(gap_s) or gap_s <= 0 or not isinstance(document.get("data"), list) or not document["data"]:
        wanted = '[{"time": minutes, "size": devices}] or {"metadata": {"gap_seconds": s}, "data": [counts]}'
        raise DataError(f"supply trace {path}: expected {wanted}")
    for index, count in enumerate(document["data"]):
        if not _is_count(count):
            raise DataError(f"supply trace {path}: data[{index}] is {count!r}; it must be a number of devices")
    return trace_of_counts([(index * float(gap_s), count) for index, count in enumerate(document["data"])], seed=seed)


def _tenplex(rows: list[Any], path: Path) -> list[tuple[float, int]]:
    """Each size holds for `time` minutes; a last entry of 0 minutes and 0 devices marks the end and is dropped."""
    counts: list[tuple[float, int]] = []
    now_s = 0.0
    for index, row in enumerate(rows):
        minutes, size = (row.get("time"), row.get("size")) if isinstance(row, dict) else (None, None)
        if not _is_number(minutes) or minutes < 0 or not _is_count(size):
            raise DataError(
                f'supply trace {path}: entry {index} is {row!r}; write {{"time": minutes, "size": devices}}'
            )
        if minutes > 0:
            counts.append((now_s, size))
            now_s += minutes * 60.0
    if not counts:
        raise DataError(f"supply trace {path}: no entry lasts longer than 0 minutes")
    return counts


def _check_times(times: list[tuple[int, float]], path: Path) -> None:
    if not times:
        raise DataError(f"supply trace {path}: no rows under the header")
    for (_, before), (line, now) in zip(times, times[1:], strict=False):
        if now < before:
            raise DataError(f"supply trace {path}, line {line}: time {now:g} is before {before:g}; order rows by time")


def _number(row: list[str], column: int, path: Path, line: int) -> float:
    try:
        value = float(row[column])
    except (ValueError, IndexError):
        raise DataError(f"supply trace {path}, line {line}: {row} has no time in its first column") from None
    if not 0 <= value < float("inf"):
        raise DataError(f"supply trace {path}, line {line}: time {row[column]}; it must be at least 0")
    return value


def _count(row: list[str], path: Path, line: int) -> int:
    if len(row) != 2 or not row[1].strip().isdigit():
        raise DataError(f"supply trace {path}, line {line}: expected time_s,devices with a whole count, found {row}")
    return int(row[1])


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
