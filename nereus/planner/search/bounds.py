"""How fast a step can still become, for every candidate of a model-stage at once: bounds that hold for all completions.

Only seconds and numbers of devices enter; memory, positions and synchronization can make a step slower, not faster.
Within a stage devices are shared out: what one model-stage takes, those that run beside it do not have. In the wave in
which one model-stage of another stage also has a task (the *crosser*: the trainer's old log-probabilities; the wave is
the *shared* one, the others in it its *members*), members either leave its devices alone or wait for it.

Example: 8 devices, the crosser holds 4 of them for 3 s of the shared wave. Two members take, on (devices: seconds),

    reference   6: 2 s   2: 4 s        critic   8: 2 s   4: 4 s   2: 8 s

Both beside the crosser share its 4 other devices, 2 each: 8 s. The reference beside it (4 s) and the critic after it
would end at 3 + 2 = 5 s if the critic had all 8 devices: that is the bound of `completions`, which gives those that
wait all that is left by what has been chosen. But the reference has 2 of them at least, so the critic has 6 at most
and ends at 3 + 4 = 7 s: the bound of `shared_floor`, which counts the devices of all members together. It takes longer
to find, and is asked of choices that passed the first.
"""

import bisect
import itertools
import math
from collections.abc import Mapping

import numpy as np

from nereus.plan import ModelStage, Stage
from nereus.planner.prices.syncs import Options
from nereus.planner.space.arrays import Floats


def step_of(waves: Floats, *, overlapped: bool) -> Floats:
    """[...]: seconds of a step, without synchronizations, of waves [..., waves].

    overlapped: the first wave (generation, of the next batch) runs beside the others; otherwise all run in turn.
    """
    first, *others = np.moveaxis(waves, -1, 0)  # sums over so short an axis are slow
    rest = sum(others, np.zeros(first.shape))
    step: Floats = np.maximum(first, rest) if overlapped else first + rest
    return step


class Bounds:
    """Bounds over the options of all model-stages of a step.

    in_turn: all run one after the other. overlapped: generation has devices of its own.
    """

    def __init__(
        self, options: Mapping[ModelStage, Options], *, num_devices: int, in_turn: bool, overlapped: bool = False
    ) -> None:
        self.options, self.num_devices = dict(options), num_devices
        self.in_turn, self.overlapped = in_turn, overlapped
        self._apart = {m: self._sets_with(m, overlapped) for m in self.options}
        self.num_waves = next(iter(self.options.values())).seconds.shape[1]
        infinite = np.full(self.num_waves, math.inf)
        self.fastest = {m: o.fastest if len(o.devices) else infinite for m, o in self.options.items()}
        self._fewest = {m: int(o.devices.min()) if len(o.devices) else num_devices + 1 for m, o in self.options.items()}
        crossing = [m for m, fastest in self.fastest.items() if (fastest > 0).sum() > 1 and np.isfinite(fastest).all()]
        assert len(crossing) <= 1, "at most one model-stage may have tasks in several waves"
        self.crosser = crossing[0] if crossing and not in_turn else None
        self.shared_wave, self.shared_members = self._shared()
        self._by_devices = {m: self._best_by_devices(o) for m, o in self.options.items()}
        self._together = {
            members: self._concurrent(members)
            for size in range(len(self.shared_members) + 1)
            for members in itertools.combinations(self.shared_members, size)
        }
        self._steps = {m: self._steps_of(m) for m in self.shared_members}
        self._shared_floors: dict[tuple[int | None, ...], float] = {}

    def _sets_with(self, m: ModelStage, overlapped: bool) -> list[list[ModelStage]]:
        """The largest sets of model-stages, `m` among them, of which no two may share a device."""
        generation = [other for other in self.options if other.stage is Stage.GENERATION] if overlapped else []
        stages = {other.stage for other in self.options} - {Stage.GENERATION} if m in generation else {m.stage}
        sets = [[other for other in self.options if other.stage is stage] + generation for stage in stages]
        return [list(dict.fromkeys(members)) for members in sets]

    def _shared(self) -> tuple[int, tuple[ModelStage, ...]]:
        """The wave in which the crosser meets model-stages of another stage, and those."""
        if self.crosser is None:
            return 0, ()
        for wave in range(self.num_waves):
            members = tuple(
                m
                for m, fastest in self.fastest.items()
                if m.stage != self.crosser.stage and 0 < fastest[wave] < math.inf
            )
            if members and self.fastest[self.crosser][wave] > 0:
                return wave, members
        return 0, ()

    def _best_by_devices(self, options: Options) -> Floats:
        """[devices + 1, waves]: the fewest seconds with at most so many devices; infinite where none fits."""
        best = np.full((self.num_devices + 1, self.num_waves), math.inf)
        for wave in range(self.num_waves):
            np.minimum.at(best[:, wave], options.devices, options.seconds[:, wave])
        np.minimum.accumulate(best, axis=0, out=best)
        return best

    def _concurrent(self, members: tuple[ModelStage, ...]) -> Floats:
        """[devices + 1]: seconds of the shared wave for these members alone, on so many disjoint devices."""
        wave, size = self.shared_wave, self.num_devices
        if not members:
            return np.zeros(size + 1)
        times = np.unique(np.concatenate([self._by_devices[m][:, wave] for m in members]))
        times = times[np.isfinite(times)]
        needed = np.zeros(len(times), dtype=np.int64)
        for m in members:
            # the fewest devices with at most that many seconds: seconds fall as devices grow
            falling = self._by_devices[m][:, wave]
            needed += size + 1 - np.searchsorted(falling[::-1], times, side="right")
        best = np.full(size + 1, math.inf)
        fits = needed <= size
        np.minimum.at(best, needed[fits], times[fits])
        found: Floats = np.minimum.accumulate(best)
        return found

    def completions(self, model_stage: ModelStage, rows: Mapping[ModelStage, int], floor: Floats) -> Floats:
        """[options of `model_stage`, waves]: seconds that no completion undercuts, given the chosen `rows`.

        floor: such seconds of the choice so far, by wave (zeros at first). Infinite where devices run out.
        """
        own = self.options[model_stage]
        rest = [m for m in self.options if m != model_stage and m not in rows]
        if self.in_turn:
            done = sum((self.options[m].seconds[row] for m, row in rows.items()), np.zeros(self.num_waves))
            after = sum((self.fastest[m] for m in rest), done)
            total: Floats = own.seconds + after
            return total
        found = np.maximum(own.seconds, np.maximum.reduce([floor, *(self.fastest[m] for m in rest)]))
        lacking = np.zeros(len(own.devices), dtype=bool)
        for members in self._apart[model_stage]:
            used = sum(int(self.options[m].devices[rows[m]]) for m in members if m in rows)
            open_ones = [m for m in members if m in rest]
            left = self.num_devices - used - sum(self._fewest[m] for m in open_ones) - own.devices
            for m in open_ones:
                room = np.clip(left + self._fewest[m], 0, self.num_devices)
                found = np.maximum(found, self._by_devices[m][room])
            lacking |= left < 0
        if self.shared_members:
            self._raise_shared_wave(model_stage, rows, own, found)
        found[lacking] = math.inf
        return found

    def _raise_shared_wave(
        self, model_stage: ModelStage, rows: Mapping[ModelStage, int], own: Options, found: Floats
    ) -> None:
        """Raise `found` in the wave in which the crosser and others run, where they must share devices."""
        assert self.crosser is not None
        wave, size = self.shared_wave, self.num_devices
        found[:, wave] = np.maximum(found[:, wave], self._together[self.shared_members][size])
        if model_stage == self.crosser or (model_stage in self.shared_members and self.crosser in rows):
            found[:, wave] = np.maximum(found[:, wave], self._best_split(model_stage, rows, own))

    def _best_split(self, model_stage: ModelStage, rows: Mapping[ModelStage, int], own: Options) -> Floats:
        """Seconds of the shared wave by the best split of its members into those that leave the crosser's devices alone
        and those that wait for it, for each option of `model_stage` (the crosser or a member).

        A bound: members still open that wait each count as if they had all devices that the chosen ones leave.
        """
        assert self.crosser is not None
        wave, crosser = self.shared_wave, self.options[self.crosser]
        is_crosser = model_stage == self.crosser
        held = own.devices if is_crosser else crosser.devices[rows[self.crosser]]
        wait = own.seconds[:, wave] if is_crosser else crosser.seconds[rows[self.crosser], wave]
        known = {
            m: (self.options[m].devices[rows[m]], self.options[m].seconds[rows[m], wave])
            for m in self.shared_members
            if m in rows
        }
        if not is_crosser:
            known[model_stage] = own.devices, own.seconds[:, wave]
        left = np.clip(self.num_devices - sum(devices for devices, _ in known.values()), 0, self.num_devices)
        best = np.full(len(own.devices), math.inf)
        for apart in self._together:
            room = self.num_devices - held - sum(known[m][0] for m in apart if m in known)
            open_apart = tuple(m for m in apart if m not in known)
            seconds = np.maximum(wait, self._together[open_apart][np.clip(room, 0, self.num_devices)])
            for m in self.shared_members:
                if m in known:
                    seconds = np.maximum(seconds, known[m][1] + (0.0 if m in apart else wait))
                elif m not in apart:
                    seconds = np.maximum(seconds, self._by_devices[m][left, wave] + wait)
            best = np.minimum(best, np.where(room < 0, math.inf, seconds))
        return best

    def _steps_of(self, m: ModelStage) -> tuple[list[float], list[int]]:
        """(seconds of the shared wave, ascending, fewest devices that reach them)."""
        falling = self._by_devices[m][:, self.shared_wave]
        drops = np.flatnonzero(np.concatenate([[math.isfinite(falling[0])], falling[1:] < falling[:-1]]))[::-1]
        return falling[drops].tolist(), drops.tolist()

    def shared_floor(self, rows: Mapping[ModelStage, int]) -> float:
        """Seconds of the shared wave that no completion of `rows` undercuts, counting the devices of all its members.

        Members beside the crosser share what it leaves; those that wait for it share all devices with the others.
        """
        if self.crosser is None or self.crosser not in rows or not self.shared_members:
            return 0.0
        key = (rows[self.crosser], *(rows.get(m) for m in self.shared_members))
        if key not in self._shared_floors:
            steps = [self._known_step(m, rows[m]) if m in rows else self._steps[m] for m in self.shared_members]
            self._shared_floors[key] = self._fewest_seconds(rows[self.crosser], steps)
        return self._shared_floors[key]

    def _known_step(self, m: ModelStage, row: int) -> tuple[list[float], list[int]]:
        options = self.options[m]
        return [float(options.seconds[row, self.shared_wave])], [int(options.devices[row])]

    def _fewest_seconds(self, crosser_row: int, steps: list[tuple[list[float], list[int]]]) -> float:
        """By bisection: what fits in some seconds also fits in more."""
        assert self.crosser is not None
        crosser = self.options[self.crosser]
        held, wait = int(crosser.devices[crosser_row]), float(crosser.seconds[crosser_row, self.shared_wave])
        waiting = [[seconds + wait for seconds in times] for times, _ in steps]
        tried = sorted({wait}.union(*(times for times, _ in steps), *waiting))

        def fits(seconds: float) -> bool:
            choices = []
            for (times, devices), late in zip(steps, waiting, strict=True):
                beside, behind = bisect.bisect_right(times, seconds), bisect.bisect_right(late, seconds)
                options = [(devices[beside - 1],) * 2] if beside else []
                choices.append([*options, (0, devices[behind - 1])] if behind else options)
            return seconds >= wait and any(
                sum(apart for apart, _ in split) <= self.num_devices - held
                and sum(needed for _, needed in split) <= self.num_devices
                for split in itertools.product(*choices)
            )

        found = bisect.bisect_left(tried, True, key=fits)
        return tried[found] if found < len(tried) else math.inf
