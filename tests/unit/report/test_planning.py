"""From a recipe to the records of a decision: the fleet from its numbers, what is assumed, what is measured, what is refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pearl.config.check import check_recipe
from pearl.config.recipe import Recipe
from pearl.core.gate import Thresholds
from pearl.core.platform import TransitionCosts
from pearl.core.policy import Borrow
from pearl.core.priors import PLATFORM_PRIORS, platform_prior, workload_prior
from pearl.core.profile import IterationTimes, PlatformProfile
from pearl.core.shape import parse_shape
from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    LeaseBegan,
    Role,
    WorkerAdded,
    fold,
)
from pearl.core.workload import within_limits
from pearl.errors import ConfigError, ProfileError, StateError
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId
from pearl.report.planning import (
    fleet_of,
    folded,
    platform_of,
    policy_of,
    situation_of,
    thresholds_of,
    workload_of,
)
from pearl.silicon.tables import silicon_profiles

ROOM = {"max_turns": 1000, "max_context_tokens": 10**6}


def recipe(**sections: dict[str, object]) -> Recipe:
    sections = {"rollout": ROOM, **sections}
    made = Recipe.model_validate({"model": {"path": "m"}, "environment": {"kind": "k"}, **sections})
    fleet_keys = {"fleet", "elastic"}
    assert [problem for problem in check_recipe(made) if problem.keys[0].split(".")[0] in fleet_keys] == []
    return made


def fleet(**values: object) -> FleetState:
    return fleet_of(recipe(fleet=values))


def profile(tp: int, **changes: object) -> PlatformProfile:
    base = PlatformProfile(
        model="m",
        model_hash="h",
        device="d",
        dtype="bfloat16",
        tp=tp,
        iterations=IterationTimes(
            prefill_tokens=(0, 1), decoding=(0, 1), context_tokens=(1,), cells_s=(((1,), (1,)), ((1,), (1,)))
        ),
        kv_capacity_tokens=1,
        kv_bytes_per_token=1,
        hand_off=None,
        weight_load_s=0.5,
        sleep_s=2.0,
        wake_s=3.0,
        engine_start_s=None,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def write(path: Path, made: PlatformProfile) -> str:
    path.write_text(made.to_json())
    return str(path)


class TestFleet:
    def test_by_hand(self) -> None:
        """Five reserved, three external and four training GPUs on nodes of four; overlap workers of two."""
        state = fleet(gpus_per_node=4, reserved_gpus=5, external_gpus=3, training_gpus=4, tp=(1, 2), overlap_tp=2)
        found = {gpu.id: (gpu.node, gpu.owner) for gpu in state.gpus.values()}
        assert found == {
            "r0": ("r-node0000", GpuOwner.RESERVED),
            "r1": ("r-node0000", GpuOwner.RESERVED),
            "r2": ("r-node0000", GpuOwner.RESERVED),
            "r3": ("r-node0000", GpuOwner.RESERVED),
            "r4": ("r-node0001", GpuOwner.RESERVED),
            "e0": ("e-node0000", GpuOwner.EXTERNAL),
            "e1": ("e-node0000", GpuOwner.EXTERNAL),
            "e2": ("e-node0000", GpuOwner.EXTERNAL),
            "t0": ("t-node0000", GpuOwner.TRAINING),
            "t1": ("t-node0000", GpuOwner.TRAINING),
            "t2": ("t-node0000", GpuOwner.TRAINING),
            "t3": ("t-node0000", GpuOwner.TRAINING),
        }
        assert {slot: worker.gpus for slot, worker in state.workers.items()} == {0: ("t0", "t1"), 1: ("t2", "t3")}
        assert all(w.role is Role.COLOCATED and w.activity is Activity.INACTIVE for w in state.workers.values())
        assert state.slots == {0: ("t0", "t1"), 1: ("t2", "t3")}
        (lease,) = state.leases.values()
        assert (lease.id, lease.gpus, lease.since_s, lease.end_s) == ("external", ("e0", "e1", "e2"), 0.0, None)
        assert state.notices == {}

    @pytest.mark.parametrize(
        ("training", "per_node", "tp", "blocks"),
        [
            (0, 8, 1, []),
            (3, 2, 1, [("t0",), ("t1",), ("t2",)]),
            (6, 4, 2, [("t0", "t1"), ("t2", "t3"), ("t4", "t5")]),
            (8, 8, 8, [("t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7")]),
            # A last node that is not full has room for as many as fit.
            (12, 8, 4, [("t00", "t01", "t02", "t03"), ("t04", "t05", "t06", "t07"), ("t08", "t09", "t10", "t11")]),
        ],
    )
    def test_overlap_workers(self, training: int, per_node: int, tp: int, blocks: list[tuple[str, ...]]) -> None:
        state = fleet(
            reserved_gpus=1,
            training_gpus=training,
            gpus_per_node=per_node,
            tp=(1, tp) if tp > 1 else (1,),
            overlap_tp=tp,
        )
        assert [state.workers[WorkerId(slot)].gpus for slot in range(len(state.workers))] == blocks

    @pytest.mark.parametrize(
        ("owner", "letter"),
        [("reserved_gpus", "r"), ("external_gpus", "e"), ("training_gpus", "t")],
    )
    def test_one_owner(self, owner: str, letter: str) -> None:
        state = fleet(**{owner: 11})
        assert sorted(state.gpus) == [f"{letter}{index:02}" for index in range(11)], "in order as text, too"
        assert len(state.leases) == (owner == "external_gpus")
        assert len(state.workers) == (11 if owner == "training_gpus" else 0)

    def test_no_gpus_are_a_fleet_too(self) -> None:
        assert fleet().gpus == {}

    def test_as_by_events(self) -> None:
        """What is written directly is what the events of each worker would have made."""

        def gpus(letter: str, owner: GpuOwner) -> tuple[Gpu, ...]:
            node = NodeId(f"{letter}-node0000")
            return tuple(Gpu(id=GpuId(f"{letter}{index}"), node=node, owner=owner) for index in range(4))

        events = [GpusJoined(gpus=gpus("r", GpuOwner.RESERVED)), GpusJoined(gpus=gpus("t", GpuOwner.TRAINING))]
        state = folded(FleetState(), events)
        for slot in range(2):
            worker = WorkerId(slot)
            block = (GpuId(f"t{2 * slot}"), GpuId(f"t{2 * slot + 1}"))
            state = folded(state, [WorkerAdded(worker=worker, gpus=block, role=Role.COLOCATED)])
            state = folded(state, [ActivityChanged(worker=worker, activity=Activity.INACTIVE)])
        state = folded(state, [LeaseBegan(lease=LeaseId("external"), gpus=gpus("e", GpuOwner.EXTERNAL), at_s=0.0)])
        made = fleet(reserved_gpus=4, training_gpus=4, external_gpus=4, tp=(2,), overlap_tp=2)
        assert made.hash == state.hash

    def test_an_event_that_does_not_fit(self) -> None:
        gpu = Gpu(id=GpuId("a"), node=NodeId("n"), owner=GpuOwner.RESERVED)
        state = folded(FleetState(), [GpusJoined(gpus=(gpu,))])
        assert state == fold(FleetState(), GpusJoined(gpus=(gpu,)))
        with pytest.raises(StateError, match=r"^fleet: GPU a is already here$"):
            folded(state, [GpusJoined(gpus=(gpu,))])


class TestPolicy:
    def test_what_is_configured(self) -> None:
        policy = policy_of(
            recipe(
                fleet={"reserved_gpus": 4, "tp": (4, 2), "hybrid": True},
                elastic={
                    "switch_gain_ratio": 0.01,
                    "switch_gain_mode": 0.02,
                    "switch_gain_tp": 0.03,
                    "return_z": 0.5,
                },
            )
        )
        assert policy.name == "pearl"
        assert policy.space.tps == (4, 2)
        assert policy.space.hybrid
        assert policy.thresholds == Thresholds(size=0.0, ratio=0.01, mode=0.02, tp=0.03)
        assert policy.return_z == 0.5

    def test_defaults(self) -> None:
        policy = policy_of(recipe(fleet={"reserved_gpus": 4}))
        assert not policy.space.hybrid
        assert policy.return_z == 1.645
        assert policy.thresholds == Thresholds()

    def test_thresholds(self) -> None:
        elastic = recipe(elastic={"switch_gain_ratio": 0, "switch_gain_mode": 0.2, "switch_gain_tp": 0.3}).elastic
        assert thresholds_of(elastic) == Thresholds(size=0, ratio=0, mode=0.2, tp=0.3)

    @pytest.mark.parametrize(
        ("training", "tps", "overlap_tp", "want"), [(0, (4, 2, 1), 1, 4), (8, (4, 2, 1), 2, 2), (0, (2,), 1, 2)]
    )
    def test_the_one_tensor_parallelism(self, training: int, tps: tuple[int, ...], overlap_tp: int, want: int) -> None:
        fleet = {"reserved_gpus": 8, "training_gpus": training, "tp": tps, "overlap_tp": overlap_tp}
        for name in ("paper", "roll", "rlboost_plus"):
            assert policy_of(recipe(fleet=fleet, elastic={"policy": name})).space.tps == (want,)

    def test_each_gets_what_it_needs(self) -> None:
        large = policy_of(recipe(elastic={"policy": "roll_large", "fixed_gpus": 7}))
        assert large.gpus == 7
        static = policy_of(recipe(elastic={"policy": "static", "shape": "1P3D"}))
        assert static.shape == parse_shape("1P3D")
        seeding = policy_of(recipe(elastic={"policy": "rlboost_plus_seeding", "seeding_s": 12}))
        assert (seeding.borrow, seeding.seeding_s) == (Borrow.SEEDING, 12)

    def test_a_shape_is_of_no_use_to_others(self) -> None:
        assert policy_of(recipe(elastic={"shape": "1P3D"})).shape is None

    def test_what_is_missing(self) -> None:
        elastic = recipe().elastic.model_copy(update={"policy": "static"})
        with pytest.raises(ConfigError, match=r"^policy static: got no shape, want one$"):
            policy_of(recipe().model_copy(update={"elastic": elastic}))


class TestWorkload:
    def test_a_prior_under_limits(self) -> None:
        rollout = {"max_turns": 5, "max_context_tokens": 10**6}
        found = workload_of(recipe(rollout=rollout, workload={"prior": "tau"}))
        assert found == within_limits(workload_prior("tau"), max_turns=5, max_context_tokens=10**6)
        assert found.turns.largest == 5

    def test_context_is_a_limit(self) -> None:
        """A web shop: 560 + 17.1 for the first turn, 76.3 for each further one; 730 - 577.1 = 152.9 has room for two."""
        found = workload_of(recipe(rollout={**ROOM, "max_context_tokens": 730}, workload={"prior": "webshop"}))
        assert found.turns.largest == 3

    def test_a_file(self, tmp_path: Path) -> None:
        """Waits are the prior's where the file has none."""
        path = tmp_path / "t.jsonl"
        turns = [{"input_tokens": 100, "output_tokens": 10}, {"input_tokens": 20, "output_tokens": 10}]
        path.write_text(json.dumps({"turns": turns}))
        found = workload_of(recipe(workload={"prior": "webshop", "trajectories": str(path)}))
        assert found.turns.mean == 2
        assert found.prompt_tokens.mean == 100
        assert found.env_s.mean == pytest.approx(0.1)

    def test_a_run_folder(self, tmp_path: Path) -> None:
        journal = tmp_path / "run" / "journal"
        journal.mkdir(parents=True)
        turn = {
            "at_s": 1,
            "trajectory": "g0.0",
            "turn": 0,
            "prompt": 100,
            "generated": 10,
            "computed": 100,
            "end": "stop",
        }
        turn |= {"versions": [[0, 10]], "workers": [0], "generate_s": 1, "env_s": 2.5}
        end = {"at_s": 4, "trajectory": "g0.0", "group": "g0", "status": "done", "turns": 1, "generated": 10}
        end |= {"reward": 1, "success": True, "started_s": 0}
        for stream, entry in (("turns", turn), ("trajectories", end)):
            header = json.dumps({"schema": f"pearl.{stream}", "version": 1})
            (journal / f"{stream}.jsonl").write_text(f"{header}\n{json.dumps(entry)}\n")
        found = workload_of(recipe(workload={"trajectories": str(tmp_path / "run")}))
        assert (found.prompt_tokens.mean, found.generated_tokens.mean, found.env_s.mean) == (100, 10, 2.5)

    @pytest.mark.parametrize("prior", ["terminal", "game"])
    def test_every_prior_can_be_planned_with(self, prior: str) -> None:
        rollout = {"max_turns": 500, "max_context_tokens": 10**6}
        assert workload_of(recipe(rollout=rollout, workload={"prior": prior})).turns.largest <= 500

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(
            ProfileError, match=r"^workload\.trajectories: nope\.jsonl: no such file; want a file of trajectories"
        ):
            workload_of(recipe(workload={"trajectories": "nope.jsonl"}))

    @pytest.mark.parametrize(("limit", "fits"), [(110, True), (109, False)])
    def test_the_first_turn_has_to_fit(self, limit: int, fits: bool, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"turns": [{"input_tokens": 100, "output_tokens": 10}]}')
        made = recipe(rollout={**ROOM, "max_context_tokens": limit}, workload={"trajectories": str(path)})
        if fits:
            assert workload_of(made).turns.largest == 1
            return
        with pytest.raises(ProfileError) as caught:
            workload_of(made)
        assert str(caught.value) == (
            f"rollout.max_context_tokens: got 109, want >= 110 (the first turn of {path}, mean); "
            "plan with trajectories like yours: workload.trajectories"
        )

    def test_a_prior_that_does_not_fit(self) -> None:
        """A web shop's prompt has 560 tokens, an answer 17.1 on average."""
        with pytest.raises(
            ProfileError, match=r"got 577, want >= 578 \(the first turn of workload\.prior webshop, mean\)"
        ):
            workload_of(recipe(rollout={"max_context_tokens": 577}, workload={"prior": "webshop"}))


class TestPlatform:
    def test_a_prior(self) -> None:
        tables = silicon_profiles("qwen3-30b-a3b", "h200", (1, 4))
        found = platform_of(
            recipe(
                fleet={"tp": (4, 1), "tp_pairs": [(1, 4)]},
                platform={
                    "prior": "qwen3-30b-a3b-h200",
                    "max_sequences": 7,
                    "prefill_chunk_tokens": 99,
                    "readback": False,
                    "time_scale": 1.5,
                },
            )
        )
        assert found.tps == (1, 4)
        assert (found.scale(1), found.scale(4)) == (1.5, 1.5)
        assert found.by_tp == tables
        assert found.costs == TransitionCosts(start_s=67.06, finalise_s=17.89, activate_s=6.09, return_s=4.38)
        assert (found.max_sequences, found.prefill_chunk_tokens, found.readback) == (7, 99, False)
        assert found.tp_pairs == frozenset({(1, 4)})

    @pytest.mark.parametrize("name", PLATFORM_PRIORS)
    def test_every_prior_has_tables_and_costs(self, name: str) -> None:
        found = platform_of(recipe(fleet={"tp": (1, 2, 4, 8)}, platform={"prior": name}))
        assert found.tps == (1, 2, 4, 8)
        assert {profile.device for profile in found.by_tp.values()} == {f"NVIDIA {name[-4:].upper()} SXM (tabulated)"}
        assert found.costs == platform_prior(name).costs

    def test_all_pairs_unless_some_are_named(self) -> None:
        assert platform_of(recipe()).tp_pairs is None
        assert platform_of(recipe(fleet={"tp_pairs": []})).tp_pairs == frozenset()

    @pytest.mark.parametrize("name", ["start_s", "finalise_s", "activate_s", "return_s", "role_change_s", "stop_s"])
    @pytest.mark.parametrize("value", [0, 12.5])
    def test_a_cost_that_is_set(self, name: str, value: float) -> None:
        before, after = platform_of(recipe()).costs, platform_of(recipe(platform={name: value})).costs
        assert getattr(after, name) == value
        assert replace(after, **{name: getattr(before, name)}) == before

    def test_measured(self, tmp_path: Path) -> None:
        """Costs come from the smallest tensor parallelism; what profiles do not tell is as everywhere."""
        paths = [
            write(tmp_path / "b.json", profile(2, engine_start_s=40.0)),
            write(tmp_path / "a.json", profile(1, engine_start_s=30.0)),
        ]
        found = platform_of(recipe(fleet={"tp": (2, 1)}, platform={"profiles": paths, "stop_s": 9}))
        assert found.by_tp == {1: profile(1, engine_start_s=30.0), 2: profile(2, engine_start_s=40.0)}
        # Waking 3 s and loading 0.5 s; sleeping 2 s.
        assert found.costs == TransitionCosts(start_s=30.0, activate_s=3.5, return_s=2.0, stop_s=9)

    def test_a_start_that_was_not_measured(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / "a.json", profile(1))]
        costs = platform_of(recipe(platform={"profiles": paths})).costs
        assert costs.start_s == TransitionCosts().start_s

    def test_a_start_of_no_time(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / "a.json", profile(1, engine_start_s=0.0))]
        assert platform_of(recipe(platform={"profiles": paths})).costs.start_s == 0

    def test_more_profiles_than_are_allowed(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / f"{tp}.json", profile(tp)) for tp in (1, 2)]
        assert platform_of(recipe(fleet={"tp": (2,)}, platform={"profiles": paths})).tps == (2,)

    def test_a_tensor_parallelism_that_nobody_knows(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileError) as caught:
            platform_of(recipe(fleet={"tp": (2, 16), "gpus_per_node": 16}))
        assert str(caught.value) == (
            "fleet.tp: got 16, want one of 1, 2, 4, 8 (what platform.prior qwen3-8b-h100 knows); measure it with `pearl profile`"
        )
        paths = [write(tmp_path / f"{tp}.json", profile(tp)) for tp in (2, 1)]
        with pytest.raises(ProfileError, match=r"fleet\.tp: got 4, want one of 1, 2 \(what platform\.profiles knows\)"):
            platform_of(recipe(fleet={"tp": (1, 4)}, platform={"profiles": paths}))

    def test_the_same_twice(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / name, profile(1)) for name in ("a.json", "b.json")]
        with pytest.raises(ProfileError, match=r"^platform\.profiles: got two of tp 1, want one for each$"):
            platform_of(recipe(platform={"profiles": paths}))

    @pytest.mark.parametrize("name", ["model_hash", "device", "dtype"])
    def test_profiles_that_do_not_belong_together(self, name: str, tmp_path: Path) -> None:
        first = profile(1)
        paths = [write(tmp_path / "a.json", first), write(tmp_path / "b.json", profile(2, **{name: "other"}))]
        with pytest.raises(ProfileError) as caught:
            platform_of(recipe(platform={"profiles": paths}))
        assert str(caught.value) == f"platform.profiles: {name}: got {getattr(first, name)} and other, want one"

    @pytest.mark.parametrize(("cell_s", "sound"), [(0.0, False), (1e-9, True)])
    def test_decoding_takes_time(self, cell_s: float, sound: bool, tmp_path: Path) -> None:
        """An idle iteration may take none."""
        cells = (((0.0, 0.0), (1.0, cell_s)), ((0.0, 0.0), (0.0, 0.0)))
        times = IterationTimes(prefill_tokens=(0, 1), decoding=(0, 1), context_tokens=(1, 2), cells_s=cells)
        made = recipe(platform={"profiles": [write(tmp_path / "a.json", profile(1, iterations=times))]})
        if sound:
            assert platform_of(made).by_tp[1].iterations == times
            return
        with pytest.raises(ProfileError) as caught:
            platform_of(made)
        message = f"platform.profiles: {tmp_path}/a.json: iterations.cells_s: got an iteration that decodes in 0 s, want > 0 s"
        assert str(caught.value) == message

    def test_names_of_a_model_are_for_people(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / "a.json", profile(1)), write(tmp_path / "b.json", profile(2, model="M"))]
        assert platform_of(recipe(platform={"profiles": paths})).tps == (1,)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "latin").write_bytes(b"ab\xe9")
        (tmp_path / "text").write_text("no")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "fits").write_bytes(b" " * 2**24)
        (tmp_path / "long").write_bytes(b" " * (2**24 + 1))
        cases = {
            tmp_path / "nope.json": f"{tmp_path}/nope.json: no such file; want a file of `pearl profile`",
            tmp_path: f"{tmp_path}: got a folder, no regular file; want a file of `pearl profile`",
            tmp_path / "latin": f"{tmp_path}/latin: cannot be read: not UTF-8 at byte 2; want a file of",
            tmp_path / "text": f"{tmp_path}/text: cannot be read as JSON: ",
            Path("/dev/zero"): "/dev/zero: got a device, no regular file; want a file of `pearl profile`",
            tmp_path / "pipe": f"{tmp_path}/pipe: got a pipe, no regular file; want a file of `pearl profile`",
            tmp_path / "fits": f"{tmp_path}/fits: cannot be read as JSON: ",
            tmp_path / "long": f"{tmp_path}/long: got 16.0 MiB, more than 16.0 MiB; want a file of `pearl profile`",
            Path("a\0b"): "'a\\x00b': cannot be read: embedded null byte; want a file of `pearl profile`",
        }
        for path, message in cases.items():
            with pytest.raises(ProfileError) as caught:
                platform_of(recipe(platform={"profiles": [str(path)]}))
            assert str(caught.value).startswith(f"platform.profiles: {message}")


def test_a_situation() -> None:
    """A batch of 3 groups of 2 begins; with a staleness of 2, three batches are admitted."""
    rollout = {**ROOM, "groups_per_batch": 3, "group_size": 2, "max_staleness": 2}
    found = situation_of(recipe(rollout=rollout, platform={"activate_s": 4, "return_s": 1}))
    progress = found.progress
    assert (progress.batch_trajectories, progress.unfinished, progress.in_flight) == (6, 6, 18)
    assert (progress.needed_groups, progress.live_groups) == (3, 9)
    assert progress.running == {0: 18}
    # Eight workers of one GPU on a node read the 8B's weights, 0.23 s.
    assert (found.toggle.prior_s, found.toggle.per_worker_s, found.toggle.observations) == (5, 0.23 / 8, 0)
    assert found.lease_prior_s == 5900
    assert (found.since_training_s, found.append_tokens, found.leases.spans) == (0.0, 0, ())
    assert found.profile.platform.costs.activate_s == 4
    assert found.profile.workload == workload_of(recipe(rollout=rollout))


def test_every_bound_of_the_configuration_is_planned_with() -> None:
    """What the recipe accepts never fails later, for the size of a number."""
    day = 86_400
    costs = dict.fromkeys(("start_s", "finalise_s", "activate_s", "return_s", "role_change_s", "stop_s"), day)
    found = situation_of(recipe(platform={**costs, "max_sequences": 10**6, "prefill_chunk_tokens": 10**6}))
    assert math.isfinite(found.toggle.prior_s)
