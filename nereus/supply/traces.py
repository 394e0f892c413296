"""Files that say which devices there are over time, as published and as written by hand.

| file | content |
|---|---|
| `.csv` | header `time_s,devices` (or `s,count`); seconds since the start and a count |
| `.csv` | header `time_ms,devices` (or `ms,count`); the same in milliseconds |
| `.csv` | `ms,add,node7` and `ms,remove,node7` (Bamboo's spot traces); a node is one device |
| `.csv`, `.txt` | `date, time, count` (`2021-12-11, 11:11:30, 55`; Bamboo's GCP traces) |
| `.txt`, `.jsonl` | `[ms, "add", {"nodes": [names]}]` a line, also `remove`, `no-op`, `migration` (Parcae) |
| `.json` | a list of `{"time": minutes, "size": devices}` (Tenplex's schedules: each size lasts so many minutes) |
| `.json` | `{"metadata": {"gap_seconds": s}, "data": [counts]}` (spot availability traces) |

Where a file gives counts, `draw_devices` chooses by seed who leaves. Times that are clock times (dates, Unix seconds)
count from the first row. Every problem is a DataError with file and line.
"""

import csv
import dataclasses
import datetime
import itertools
import json
from pathlib import Path
from random import Random
from typing import Any, TypeGuard

from nereus.errors import DataError

CLOCK_S = 1e8
"""A first time from here on (three years) is a time of day, not one since the start."""

HEADERS = {("time_s", "devices"): 1.0, ("s", "count"): 1.0, ("time_ms", "devices"): 1e-3, ("ms", "count"): 1e-3}
"""Seconds of one unit of the first column, by header."""

FORMS = (
    "read are .csv with a header time_s,devices or time_ms,devices, or rows ms,add|remove,node or date,time,count; "
    '.txt with rows date, time, count or [ms, "add"|"remove", {"nodes": [names]}]; .json with '
    '[{"time": minutes, "size": devices}] or {"metadata": {"gap_seconds": s}, "data": [counts]}'
)


@dataclasses.dataclass(frozen=True, slots=True)
class SupplyChange:
    """From `time_s` on, these devices (ascending) are there."""

    time_s: float
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTrace:
    """Changes in ascending time, the first at 0; the last lasts for ever."""

    changes: tuple[SupplyChange, ...]

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
        case ".txt" | ".jsonl" if text.lstrip().startswith("["):
            return _from_events(text, path)
        case ".csv" | ".txt":
            return _from_csv(text, path, seed)
        case ".json":
            return _from_json(text, path, seed)
        case suffix:
            raise DataError(f"supply trace {path}: {suffix or 'no suffix'} is not read; {FORMS}")


def trace_of_counts(counts: list[tuple[float, int]], *, seed: int) -> DeviceTrace:
    """The trace of (time_s, count) rows in ascending time; before the first row its count holds."""
    devices = draw_devices([count for _, count in counts], seed=seed)
    changes = [SupplyChange(time_s, ids) for (time_s, _), ids in zip(counts, devices, strict=True)]
    changes[0] = SupplyChange(0.0, changes[0].devices)
    return DeviceTrace(tuple(c for i, c in enumerate(changes) if i == 0 or c.devices != changes[i - 1].devices))


def draw_devices(counts: list[int], *, seed: int) -> list[tuple[int, ...]]:
    """Device ids for a sequence of counts: the lowest free ids come, and who leaves is drawn by seed."""
    random, here, result = Random(seed), list[int](), list[tuple[int, ...]]()
    for count in counts:
        if result and len(result[-1]) == count:
            result.append(result[-1])
            continue
        while len(here) > count:
            here.remove(random.choice(here))
        taken = set(here)
        free = (device for device in itertools.count() if device not in taken)
        here = sorted(here + list(itertools.islice(free, count - len(here))))
        result.append(tuple(here))
    return result


def _from_csv(text: str, path: Path, seed: int) -> DeviceTrace:
    rows = [(line, row) for line, row in enumerate(csv.reader(text.splitlines()), start=1) if row and any(row)]
    if not rows:
        raise DataError(f"supply trace {path}: empty; {FORMS}")
    first = tuple(cell.strip() for cell in rows[0][1])
    unit_s = HEADERS.get(first[:2]) if len(first) == 2 else None
    if unit_s is not None:
        counts = [(_number(row, 0, path, line) * unit_s, _count(row, path, line)) for line, row in rows[1:]]
        return _from_counts([line for line, _ in rows[1:]], counts, path, seed)
    if len(first) == 3 and first[1] in ("add", "remove"):
        return _from_names(rows, path)
    if len(first) == 3 and "-" in first[0]:
        counts = [_dated(row, path, line) for line, row in rows]
        return _from_counts([line for line, _ in rows], counts, path, seed)
    if len(first) == 2 and first[1].isdigit():
        raise DataError(
            f"supply trace {path}: rows without a header; put time_s,devices above them, or time_ms,devices where the "
            "first column is in milliseconds"
        )
    raise DataError(f"supply trace {path}, line {rows[0][0]}: {rows[0][1]} is no row of a form that is read; {FORMS}")


def _from_counts(lines: list[int], counts: list[tuple[float, int]], path: Path, seed: int) -> DeviceTrace:
    """Rows of (seconds, count); clock times count from the first."""
    _check_times([(line, time_s) for line, (time_s, _) in zip(lines, counts, strict=True)], path)
    start_s = counts[0][0] if counts[0][0] >= CLOCK_S else 0.0
    return trace_of_counts([(time_s - start_s, count) for time_s, count in counts], seed=seed)


def _dated(row: list[str], path: Path, line: int) -> tuple[float, int]:
    """(Unix seconds, count) of `date, time, count`."""
    cells = [cell.strip() for cell in row]
    if len(cells) != 3 or not cells[2].isdigit():
        raise DataError(f"supply trace {path}, line {line}: expected date, time, count, found {row}")
    try:
        moment = datetime.datetime.fromisoformat(f"{cells[0]}T{cells[1]}")
    except ValueError:
        raise DataError(f"supply trace {path}, line {line}: {cells[0]}, {cells[1]} is no date and time") from None
    return moment.replace(tzinfo=datetime.UTC).timestamp(), int(cells[2])


def _from_events(text: str, path: Path) -> DeviceTrace:
    """Parcae's lines, as rows of names; a line that is neither `add` nor `remove` changes nothing."""
    rows: list[tuple[int, list[str]]] = []
    for line, written in enumerate(text.splitlines(), start=1):
        if not written.strip():
            continue
        try:
            time_ms, what, change = json.loads(written)
            names = [str(name) for name in change["nodes"]] if what in ("add", "remove") else []
        except (ValueError, TypeError, KeyError):
            form = '[ms, "add"|"remove"|"no-op"|"migration", {"nodes": [names]}]'
            raise DataError(f"supply trace {path}, line {line}: expected {form}") from None
        rows += [(line, [str(time_ms), str(what), name]) for name in names]
    if not rows:
        raise DataError(f"supply trace {path}: no line adds a node")
    return _from_names(rows, path)


def _from_names(rows: list[tuple[int, list[str]]], path: Path) -> DeviceTrace:
    """Bamboo's rows; devices are numbered in the order in which their nodes first come."""
    ids: dict[str, int] = {}
    here: set[int] = set()
    changes: list[SupplyChange] = []
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
        changes.append(SupplyChange(time_s, tuple(sorted(here))))
    changes[0] = SupplyChange(0.0, changes[0].devices)
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
        raise DataError(f"supply trace {path}: not a form that is read; {FORMS}")
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
