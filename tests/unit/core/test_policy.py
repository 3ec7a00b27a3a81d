import math

import numpy as np
import pytest

from pearl.core.fluid import APPEND_TOKENS, FluidPredictor
from pearl.core.gate import Z_95, Thresholds
from pearl.core.lines import Space
from pearl.core.makespan import Infeasible, Target, candidates_of
from pearl.core.paper_model import PaperPredictor
from pearl.core.policy import POLICIES, Borrow, GivenTimes, Policy, PolicyOptions, policy_named
from pearl.core.shape import parse_shape
from pearl.errors import ConfigError, ShapeError
from tests.fleets import situation

THRESHOLDS = Thresholds(ratio=0.2, mode=0.3, tp=0.4)
OPTIONS = PolicyOptions(
    tps=(1, 2, 4),
    fixed_tp=2,
    hybrid=True,
    thresholds=THRESHOLDS,
    return_z=2.0,
    gpus=12,
    shape=parse_shape("2P6D@tp2"),
    seeding_s=45.0,
    truth={"4C": 10.0},
)


def test_ours_may_do_everything() -> None:
    assert policy_named("pearl", OPTIONS) == Policy(
        name="pearl",
        predictor=FluidPredictor(),
        space=Space(hybrid=True, tps=(1, 2, 4), append_tokens=APPEND_TOKENS),
        borrow=Borrow.ANY,
        thresholds=THRESHOLDS,
        lease_aware=True,
        return_z=2.0,
    )


def test_the_papers_knows_one_tensor_parallelism_and_borrows_all_or_none() -> None:
    policy = policy_named("paper", OPTIONS)
    assert isinstance(policy.predictor, PaperPredictor)
    assert policy == Policy(
        name="paper",
        predictor=policy.predictor,
        space=Space(tps=(2,)),
        borrow=Borrow.ALL_OR_NONE,
        thresholds=THRESHOLDS,
        return_z=2.0,
    )


@pytest.mark.parametrize(
    ("name", "external", "gpus", "borrow", "seeding_s"),
    [
        ("roll", False, None, Borrow.NEVER, 0.0),
        ("roll_large", True, 12, Borrow.NEVER, 0.0),
        ("rlboost_plus", True, None, Borrow.NEVER, 0.0),
        ("rlboost_plus_seeding", True, None, Borrow.SEEDING, 45.0),
    ],
)
def test_baselines_are_colocated(name: str, external: bool, gpus: int | None, borrow: Borrow, seeding_s: float) -> None:
    assert policy_named(name, OPTIONS) == Policy(
        name=name,
        predictor=FluidPredictor(),
        space=Space(disaggregated=False, tps=(2,)),
        borrow=borrow,
        external=external,
        gpus=gpus,
        thresholds=THRESHOLDS,
        seeding_s=seeding_s,
        return_z=2.0,
    )


def test_borrow_all_is_ours_but_for_borrowing() -> None:
    policy, ours = policy_named("borrow_all", OPTIONS), policy_named("pearl", OPTIONS)
    assert (policy.name, policy.borrow) == ("borrow_all", Borrow.ALWAYS)
    assert (policy.space, policy.predictor, policy.lease_aware) == (ours.space, ours.predictor, True)


@pytest.mark.parametrize(
    ("shape", "colocated", "disaggregated", "tps"),
    [
        ("2P6D@tp2", False, True, (2,)),
        ("4C@tp4", True, False, (4,)),
        ("4P@tp1+2D@tp4", False, True, (1, 4)),
        ("1P1D@tp4+2C@tp1", True, True, (1, 4)),
    ],
)
def test_a_static_one_falls_back_within_its_mode(
    shape: str, colocated: bool, disaggregated: bool, tps: tuple[int, ...]
) -> None:
    assert policy_named("static", PolicyOptions(shape=parse_shape(shape), tps=(1,))) == Policy(
        name="static",
        predictor=FluidPredictor(),
        space=Space(colocated=colocated, disaggregated=disaggregated, tps=tps),
        borrow=Borrow.NEVER,
        shape=parse_shape(shape),
    )


def test_the_oracle_is_told_and_cannot_be_had() -> None:
    policy = policy_named("oracle", OPTIONS)
    assert policy.predictor == GivenTimes({"4C": 10.0})
    assert (policy.name, policy.realisable, policy.borrow) == ("oracle", False, Borrow.ANY)
    assert policy.space == policy_named("pearl", OPTIONS).space


def test_all_names_are_known_and_only_the_oracle_is_not_real() -> None:
    policies = {name: policy_named(name, OPTIONS) for name in POLICIES}
    assert all(policy.name == name for name, policy in policies.items())
    assert [name for name, policy in policies.items() if not policy.realisable] == ["oracle"]
    assert [name for name, policy in policies.items() if policy.lease_aware] == ["pearl", "borrow_all", "oracle"]
    assert len(POLICIES) == 9


def test_defaults() -> None:
    policy = policy_named("pearl", PolicyOptions())
    assert (policy.thresholds, policy.return_z, policy.space.tps, policy.space.hybrid) == (
        Thresholds(),
        Z_95,
        None,
        False,
    )
    assert policy_named("rlboost_plus", PolicyOptions()).space.tps == (1,)
    assert policy_named("rlboost_plus_seeding", PolicyOptions()).seeding_s == 60.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("roll_large", r"^policy roll_large: got no gpus, want one$"),
        ("static", r"^policy static: got no shape, want one$"),
        (
            "best",
            r"^policy: got 'best', want one of pearl, paper, roll, roll_large, rlboost_plus, rlboost_plus_seeding, "
            r"borrow_all, static, oracle$",
        ),
    ],
)
def test_what_is_missing_or_unknown_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_named(name, PolicyOptions())


def test_a_shape_that_no_predictor_can_be_asked_about_is_refused() -> None:
    with pytest.raises(ShapeError, match="got another tensor parallelism for prefill, want at most one"):
        policy_named("static", PolicyOptions(shape=parse_shape("1P@tp1+1P@tp2+1D@tp1")))


def test_given_times_are_given_by_text() -> None:
    given = GivenTimes(
        {"4C": 10.0, "1P3D append<=256": 0.0, "2C": math.inf, "3C": math.nan, "1C": -1.0, "2C@tp1+1C@tp2": 3.0}
    )
    about = situation()
    targets = [
        Target(shape=parse_shape(text), append_tokens=append)
        for text, append in (
            ("4C", 0),
            ("1P3D", 256),
            ("1P3D", 0),
            ("2C", 0),
            ("3C", 0),
            ("1C", 0),
            ("1C@tp2+2C@tp1", 0),  # in whichever order
        )
    ]
    found = given.forecast(about.profile, about.progress)(candidates_of(targets))
    inf = np.inf
    assert found.close_s.tolist() == [10.0, 0.0, inf, inf, inf, inf, 3.0]
    assert found.error_s.tolist() == [0.0, 0.0, inf, inf, inf, inf, 0.0]
    told, not_told = Infeasible.NO, Infeasible.UNSUPPORTED
    assert found.infeasible.tolist() == [told, told, not_told, not_told, not_told, not_told, told]
    assert (given.name, given.appends) == ("oracle", True)
