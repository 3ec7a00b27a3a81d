import asyncio
from dataclasses import replace

import pytest

from benchmarks.sim_vs_real import (
    FULL,
    MAX_CONTEXT_TOKENS,
    QUICK,
    CountingCodec,
    ScriptedPool,
    mean_times,
    sessions_of,
)
from pearl.core.profile import IterationTimes
from pearl.records.ids import TaskId
from pearl.records.trajectory import Task

TIMES = IterationTimes(
    prefill_tokens=(0, 8), decoding=(0, 1), context_tokens=(4,), cells_s=(((1.0,), (2.0,)), ((3.0,), (4.0,)))
)


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_sessions_fit_the_engines_and_repeat(size: object) -> None:
    sessions = sessions_of(size, 5)  # type: ignore[arg-type]
    assert sessions == sessions_of(size, 5)  # type: ignore[arg-type]
    assert sessions != sessions_of(size, 6)  # type: ignore[arg-type]
    ends = [script.starts[-1] + script.turns[-1].output_tokens for script in sessions.scripts]
    assert max(ends) <= MAX_CONTEXT_TOKENS
    assert all(script.turns[-1].env_s == 0 for script in sessions.scripts)


def test_environment_says_what_the_codec_writes() -> None:
    sessions = sessions_of(QUICK, 5)
    script = sessions.scripts[1]
    task = Task(id=TaskId("session#1"), environment="script", seed=1, params={})

    async def work() -> tuple[str, str, bool]:
        environment = await ScriptedPool(sessions).open(task)
        first, reply = await environment.reset(0), await environment.step("")
        await environment.close()
        return first, reply.observation, reply.done

    first, second, done = asyncio.run(work())
    codec = CountingCodec()
    assert len(codec.first_prompt(first)) == script.turns[0].input_tokens
    assert len(codec.append(second, closed=False)) == script.turns[1].input_tokens
    assert not done
    assert codec.stop_token_ids == ()


def test_mean_of_tables() -> None:
    other = replace(TIMES, cells_s=(((3.0,), (2.0,)), ((3.0,), (8.0,))))
    assert mean_times(TIMES, other).cells_s == (((2.0,), (2.0,)), ((3.0,), (6.0,)))
    with pytest.raises(ValueError, match="want equal ones"):
        mean_times(TIMES, replace(TIMES, context_tokens=(5,)))
