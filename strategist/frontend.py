"""Targets of `emit` as front ends of the search: which layouts of a job each of them can say, in its own words; and which of them a
plan is for when nobody names one.

The planner knows no emitters and they know no columns; here a row is shown to a target as if it were a Plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from strategist.document.plan import FrontEnd, PassedOver, Reason, Share, Stage
from strategist.emitters import EMITTERS, find_emitter
from strategist.emitters.emitter import Emitter
from strategist.errors import ImpossibleError
from strategist.executor.support import script_obstacles
from strategist.facts.job import ByLayout, Job
from strategist.facts.profile import Profile, find_profile, profile_for, with_frozen_base
from strategist.planner.check import require_sound
from strategist.planner.kinds import UNEVEN
from strategist.planner.write import fields_of, formats_of, mesh_of, stages_of, strategy_of
from strategist.records import dataclass, names_of, replace
from strategist.rulebook.apply import fired, sentence
from strategist.rulebook.rule import load_rules
from strategist.space.candidates import MESH_COLUMNS, OF_LAYERS, OPTION_COLUMNS, Candidates, Column, Mask

if TYPE_CHECKING:
    from strategist.document.plan import Plan

BATCH = ("micro_batch", "accumulation")
ALIKE = ("mesh", *(name for name in OPTION_COLUMNS if name not in BATCH))
"""Columns of which layouts that differ in their micro-batches alone have one value each."""


class Choices(SimpleNamespace):
    """The strategy of one row. It notes whether anybody looked at its micro-batches."""

    batch: tuple[int, int]
    looked = False

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        self.looked = True
        return self.batch[0]

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        self.looked = True
        return self.batch[1]


@dataclass(frozen=True, slots=True)
class Target:
    """A target of `emit`, by name."""

    name: str

    @property
    def emitter(self) -> Emitter:
        """The target itself."""
        return find_emitter(self.name, "--frontend")

    def as_run(self, job: Job) -> Job:
        """The job as what the target's files start runs it; those on our executor are run as ever."""
        base = _known_there(profile_for(self.name, job.workload.precision), job)
        return job if base == job.profile else replace(job, profile=base, by_layout=self.by_layout)

    def by_layout(self, job: Job, candidates: Candidates) -> ByLayout:
        """Profiles of a job's layouts: that of the target, or one of DeepSpeed's where that does the work."""
        first, sort = candidates.alike("zero", "offload", "tp", "pp")
        own = [self._profile(job, candidates.where(first[place : place + 1])) for place in range(len(first))]
        places: dict[Profile, list[int]] = {}
        for place, profile in enumerate(own):
            places.setdefault(profile, []).append(place)
        return tuple((profile, np.flatnonzero(np.isin(sort, same))) for profile, same in places.items())

    def _profile(self, job: Job, candidate: Candidates) -> Profile:
        """The profile of one layout."""
        words = candidate.row(0)
        strategy: Any = SimpleNamespace(zero=words["zero"], offload=words["offload"], formats=formats_of(job))
        is_engine, alone = self.emitter.by_deepspeed(strategy), words["tp"] == words["pp"] == 1
        own = profile_for(self.name, job.workload.precision, is_engine, int(words["zero"]), alone)
        return _known_there(own, job)

    def says(self, job: Job, candidates: Candidates) -> Mask:
        """Which layouts the target has files for, (C,).

        Layouts that differ in their micro-batches alone are asked about once, as long as the target does not look at these.
        """
        show, obstacles = shown_plans(job, candidates), self.emitter.obstacles
        first, sort = _alike(candidates)
        says, looks = np.zeros(len(first), np.bool_), np.zeros(len(first), np.bool_)
        for place, row in enumerate(first.tolist()):
            plan = show(row)
            says[place] = next(obstacles(plan), None) is None
            looks[place] = cast(Choices, plan.strategy).looked
        said: Mask = says[sort]
        for row in np.flatnonzero(looks[sort]).tolist():
            said[row] = next(obstacles(show(row)), None) is None
        return said

    def obstacles(self, job: Job, candidates: Candidates, row: int) -> tuple[str, ...]:
        """Sentences about what the target cannot say of one layout."""
        return tuple(self.emitter.obstacles(shown_plans(job, candidates)(row)))

    def nearest(self, job: Job, candidates: Candidates) -> int:
        """The first row of those with the fewest obstacles."""
        show, obstacles = shown_plans(job, candidates), self.emitter.obstacles
        first, _ = _alike(candidates)
        return int(min(first.tolist(), key=lambda row: (len(tuple(obstacles(show(row)))), row)))


def _known_there(profile: Profile, job: Job) -> Profile:
    """The profile for what a job trains. Where nobody knows what its optimizer holds there, no target can say it, and ours
    stands for it."""
    if job.workload.optimizer not in dict(profile.optimizer_state_bytes):
        profile = find_profile()
    return profile if job.model.adapters is None else with_frozen_base(profile)


def _alike(candidates: Candidates) -> tuple[Column, Column]:
    """A row of each sort of layouts that differ in their micro-batches alone, and every row's sort."""
    return candidates.alike(*ALIKE, *(name for name in OF_LAYERS if name in candidates.columns))


def chosen_frontend(plan: Plan, purpose: str, folders: tuple[str, ...] = ()) -> FrontEnd | None:
    """The front end of the first rule that holds, or where that cannot say the plan, of those behind it, or any other; None where no
    target can. Raises RuleError for a fault in the rules of a folder."""
    degrees = {axis: plan.mesh.size(axis) for axis in ("tp", "pp", "cp", "ep")} | {"dp": plan.mesh.data_parallel}
    dimensions = sum(degree > 1 for degree in degrees.values())
    values = {"purpose": purpose, "heads": plan.model.heads, "dimensions": dimensions} | degrees
    ours, every = load_rules("frontends"), load_rules("frontends", folders)
    rule = next(iter(fired((*every[len(ours) :], *ours), values)), None)  # a user's rules are asked first
    if rule is None:
        return None
    passed: list[PassedOver] = []
    for name in dict.fromkeys((*rule.targets, *(emitter.name for emitter in EMITTERS))):
        obstacle = next(_unsayable(plan, find_emitter(name)), None)
        if obstacle is None:
            reason = Reason(rule=rule.id, kind="decision", sentence=sentence(rule.because, values), source=rule.source)
            return FrontEnd(target=name, reason=reason, passed_over=tuple(passed))
        passed.append(PassedOver(target=name, sentence=obstacle))
    return None


def _unsayable(plan: Plan, emitter: Emitter) -> Iterator[str]:
    """What keeps a target from a plan."""
    yield from emitter.obstacles(plan)
    if emitter.engine == "strategist":
        yield from (obstacle.sentence for obstacle in script_obstacles(plan))


def target_of(plan: Plan) -> tuple[str, str]:
    """The target that a plan is emitted for when nobody names one, and why. Raises ImpossibleError UNSUPPORTED where none can say it,
    FRAMEWORK_LEGALITY for a plan that is not sound."""
    require_sound(plan)
    if plan.frontend is not None:
        return plan.frontend.target, plan.frontend.words
    named = plan.request.frontend
    if named not in ("any", "strategist"):
        return named, f"{named}: the plan was made with --frontend {named}."
    found = chosen_frontend(plan, "unsure")
    if found is None:
        raise ImpossibleError(
            "UNSUPPORTED",
            "No target can say this plan.",
            flag="--to",
            hint="`strategist emit PLAN --to TARGET` says why not; plan with --frontend and a target of `strategist emit --list`.",
        )
    return found.target, found.words


BY_PROFILE = ("formats", "compile", "profile")
"""Fields of a strategy that the profile decides."""


def _by_profile(job: Job, candidates: Candidates) -> tuple[list[dict[str, Any]], Column]:
    """What the profiles of some layouts decide, and the place of every layout's, (C,)."""
    parts = () if job.by_layout is None else job.by_layout(job, candidates)
    runs_as, own = np.zeros(len(candidates), np.int64), []
    for place, (profile, rows) in enumerate(parts):
        runs_as[rows] = place
        own.append(fields_of(replace(job, profile=profile)))
    return own or [fields_of(job)], runs_as


def shown_plans(job: Job, candidates: Candidates) -> Callable[[int], Plan]:
    """What targets read of a Plan, for any row: machines, model, work, mesh and strategy, and how many processes there are."""
    first = strategy_of(job, candidates.row(0))
    chosen = [name for name in candidates.choices if name not in (*BATCH, *MESH_COLUMNS)]
    left = (*BATCH, *chosen, *BY_PROFILE, "stages")
    same = {name: getattr(first, name) for name in names_of(type(first)) if name not in left}
    own, runs_as = _by_profile(job, candidates)
    one_process, is_uneven = candidates.in_threads, UNEVEN in candidates.columns

    @cache
    def stages(pp: int, virtual_stages: int, stage_split: str, schedule: str) -> tuple[Stage, ...]:
        row = {"pp": pp, "virtual_stages": virtual_stages, "stage_split": stage_split, "schedule": schedule}
        return stages_of(job, row)

    def show(row: int) -> Plan:
        words: dict[str, Any] = {name: candidates.word(name, row) for name in chosen}
        mesh = mesh_of({axis: int(candidates[axis][row]) for axis in MESH_COLUMNS})
        cut = stages(mesh.pp, words["virtual_stages"], words["stage_split"], words["schedule"])
        words |= own[runs_as[row]]
        words["sequence_parallel"] = bool(words["sequence_parallel"])
        if is_uneven:
            words[UNEVEN] = tuple(
                Share(replicas=group.count * group.node.gpus // mesh.tp, micro_batches=1)
                for group in job.cluster.groups
            )
        batch = (int(candidates["micro_batch"][row]), int(candidates["accumulation"][row]))
        plan = SimpleNamespace(
            cluster=job.cluster,
            model=job.model,
            workload=job.workload,
            mesh=mesh,
            strategy=Choices(**(same | words), stages=cut, batch=batch),
            processes=1 if one_process else mesh.world,
        )
        return cast("Plan", plan)

    return show
