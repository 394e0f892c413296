"""Which devices a job may use, now and soon: the seam, and what says so without a cluster manager.

    trace file --read_trace--> TraceSupply --+
    notice file or URL --------------------> NoticedSupply --at(time)--> SupplyView --> the boundary's decision

A view is a value: the devices that may be used from this boundary on, and what is announced. A device that a trace has
taken away is absent from the view; it leaves once its state has moved. What Ray knows of its nodes is read in the
runtime, which is the only place that imports Ray.
"""

import abc
import bisect
import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from nereus.errors import ConfigError, DataError
from nereus.recipe.sections import SupplyConfig
from nereus.supply.traces import DeviceTrace, read_trace


@dataclasses.dataclass(frozen=True, slots=True)
class Announcement:
    """Devices that will leave, or come, in `deadline_s` seconds from the view."""

    devices: tuple[int, ...]
    deadline_s: float
    leaving: bool = True

    def without(self, devices: Collection[int]) -> "Announcement":
        """The same of the other devices."""
        return dataclasses.replace(self, devices=tuple(device for device in self.devices if device not in devices))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"devices": list(self.devices)}

    @classmethod
    def from_json(cls, row: Any) -> "Announcement":
        return cls(tuple(row["devices"]), row["deadline_s"], row["leaving"])


@dataclasses.dataclass(frozen=True, slots=True)
class SupplyView:
    """What a supply says at one moment. devices: ascending; those announced to leave are among them until they do."""

    devices: tuple[int, ...]
    announced: tuple[Announcement, ...] = ()

    @classmethod
    def from_event(cls, line: Mapping[str, Any]) -> "SupplyView":
        """The view of a `supply` line of `events.jsonl`."""
        return cls(tuple(line["devices"]), tuple(Announcement.from_json(row) for row in line["announced"]))

    @property
    def deadline_s(self) -> float | None:
        """Seconds to the next announced change."""
        return min((a.deadline_s for a in self.announced), default=None)

    @property
    def leaving(self) -> frozenset[int]:
        """Devices that are announced to leave."""
        return frozenset(device for a in self.announced if a.leaving for device in a.devices)

    def leaving_within(self, seconds: float) -> frozenset[int]:
        """Devices that will have left after so many seconds."""
        return frozenset(d for a in self.announced if a.leaving and a.deadline_s <= seconds for d in a.devices)


class Supply(abc.ABC):
    """Says which devices a job may use. `StaticSupply` is the fake for tests.

    `at` is called before every step, and again and again while a job is paused, from one thread, with seconds since the
    run started that never decrease; before the run it may be asked for time 0. What it returns is a value: only the
    answer to a later time may differ. A device that is absent from a view is left before the next step; until then its
    state can still be read. One that is announced to leave is in the view until it does, and may be announced more than
    once: the first deadline counts. DataError is raised where the source cannot be read; a source that may be away and
    does not answer leaves the view as it was.
    """

    @abc.abstractmethod
    def at(self, time_s: float) -> SupplyView:
        """The devices at a time, and what is announced then; called from the main path, so it answers in seconds."""


class StaticSupply(Supply):
    """The same devices for ever, or a list of views by the time they begin (from 0)."""

    def __init__(self, devices: Iterable[int], *, later: Sequence[tuple[float, SupplyView]] = ()) -> None:
        self._views = [(0.0, SupplyView(tuple(sorted(devices)))), *later]

    def at(self, time_s: float) -> SupplyView:
        return [view for start_s, view in self._views if start_s <= time_s][-1]


class TraceSupply(Supply):
    """The devices of a trace. notice_s: a device's leaving is announced so long before; 0 announces nothing."""

    def __init__(self, trace: DeviceTrace, *, notice_s: float = 0.0) -> None:
        self._trace, self._notice_s = trace, notice_s

    def at(self, time_s: float) -> SupplyView:
        changes = self._trace.changes
        index = max(0, bisect.bisect_right(changes, time_s, key=lambda change: change.time_s) - 1)
        here = set(changes[index].devices)
        announced: list[Announcement] = []
        for change in changes[index + 1 :]:
            if change.time_s - time_s > self._notice_s:
                break
            leaving = here - set(change.devices)
            if leaving:
                announced.append(Announcement(tuple(sorted(leaving)), change.time_s - time_s))
                here -= leaving
        return SupplyView(changes[index].devices, tuple(announced))


def configured_supply(config: SupplyConfig, devices: Sequence[int], *, otherwise: Supply | None = None) -> Supply:
    """The supply a recipe asks for; without a trace `otherwise`, by default `devices` all the time.

    Raises ConfigError where the trace needs devices that are not among them.
    """
    supply = otherwise or StaticSupply(devices)
    if config.trace is not None:
        trace = read_trace(config.trace, seed=config.seed)
        missing = sorted(set(trace.device_ids) - set(devices))
        if missing:
            raise ConfigError(
                "supply.trace",
                f"{config.trace} has up to {len(trace.device_ids)} devices; the cluster has {len(devices)} "
                f"(set cluster.workers to {len(trace.device_ids)})",
            )
        supply = TraceSupply(trace)
    return NoticedSupply(supply, config.notices) if config.notices is not None else supply


NOTICE_TIMEOUT = timedelta(seconds=2)
"""How long a notice endpoint may take at a boundary."""


class NoticedSupply(Supply):
    """Another supply, less the devices that notices take away.

    source: a file or an http(s) URL with `{"device": 3, "deadline_s": 120}`, a list of these, or one a line; absent or
    empty (HTTP 404 or 204) means none. A deadline counts from when its notice is first seen; a notice that disappears
    is withdrawn. An endpoint that does not answer leaves the notices as they were: `problem` says so.
    """

    def __init__(self, supply: Supply, source: str | Path) -> None:
        self._supply, self._source = supply, str(source)
        self._due_s: dict[int, float] = {}
        self.problem: str | None = None

    def at(self, time_s: float) -> SupplyView:
        notices = self._read()
        if notices is not None:
            self._due_s = {
                device: self._due_s.get(device, time_s + deadline_s) for device, deadline_s in notices.items()
            }
        under = self._supply.at(time_s)
        left = [device for device in under.devices if self._due_s.get(device, time_s + 1) > time_s]
        by_time: dict[float, list[int]] = {}
        for device in left:
            if device in self._due_s:
                by_time.setdefault(self._due_s[device], []).append(device)
        noticed = [Announcement(tuple(devices), due_s - time_s) for due_s, devices in sorted(by_time.items())]
        under_left = [a.without(set(under.devices) - set(left)) for a in under.announced]
        return SupplyView(tuple(left), (*(a for a in under_left if a.devices), *noticed))

    def _read(self) -> dict[int, float] | None:
        """{device: deadline_s}, or None where the endpoint does not answer."""
        if not self._source.startswith(("http://", "https://")):
            path = Path(self._source)
            return parse_notices(path.read_text(), self._source) if path.is_file() else {}
        try:
            with urllib.request.urlopen(self._source, timeout=NOTICE_TIMEOUT.total_seconds()) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                text = ""
            else:
                self.problem = f"{self._source}: {error}"
                return None
        except OSError as error:
            self.problem = f"{self._source}: {error}"
            return None
        self.problem = None
        return parse_notices(text, self._source)


def parse_notices(text: str, source: str) -> dict[int, float]:
    """{device: deadline_s} of a notice document; raises DataError naming source and line."""
    rows: dict[int, float] = {}
    for line, value in _documents(text, source):
        for row in value if isinstance(value, list) else [value]:
            if not isinstance(row, dict) or set(row) != {"device", "deadline_s"}:
                raise DataError(f'{source}, line {line}: write {{"device": 3, "deadline_s": 120}}, found {row!r}')
            device, deadline_s = row["device"], row["deadline_s"]
            if isinstance(device, bool) or not isinstance(device, int) or device < 0:
                raise DataError(f"{source}, line {line}: device is {device!r}; it must be a device id")
            if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not deadline_s >= 0:
                raise DataError(f"{source}, line {line}: deadline_s is {deadline_s!r}; it must be seconds from now")
            rows[device] = float(deadline_s)
    return rows


def _documents(text: str, source: str) -> list[tuple[int, Any]]:
    """(line, value) of one JSON document, or of one a line."""
    if not text.strip():
        return []
    try:
        return [(1, json.loads(text))]
    except json.JSONDecodeError as whole:
        found: list[tuple[int, Any]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    found.append((number, json.loads(line)))
                except json.JSONDecodeError as error:
                    at = whole.lineno if not found else number
                    raise DataError(f"{source}, line {at}: not JSON ({error.msg})") from None
        return found
