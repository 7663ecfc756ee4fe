"""The simulation behind `benchmarks/scaling_sim.py`: work is neither lost nor invented, and HPA is HPA."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from scaling_fleet import Fleet, Job, Replica, ServiceTimes
from scaling_hpa import Autoscaler
from scaling_sim import Limits, Policy, Simulation
from scaling_trace import Arrival, TraceShape, trace

TIMES = ServiceTimes(encode_token=1e-3, prefill_token=1e-3, step=10e-3, step_request=2e-3, chunk=100, seats=2)


def job(*, encode: float = 0.0, prompt: int = 100, output: int = 11) -> Job:
    return Job(Arrival(0.0, 0, prompt, output), encode, prompt, output)


def run_out(replica: Replica) -> list[Job]:
    done = []
    while (at := replica.next_event()) < math.inf:
        done += replica.advance(at)
    return done


def test_a_lone_request_takes_its_chunk_and_its_steps() -> None:
    replica, one = Replica(TIMES, 0.0, 0.0), job()
    replica.add(one, 0.0)
    assert run_out(replica) == [one]
    assert one.first_token == pytest.approx(0.1 + 0.010)
    assert one.finished - one.first_token == pytest.approx(10 * 0.012)
    assert replica.busy == pytest.approx(one.finished)


def test_a_prompt_beside_it_slows_a_request_that_decodes() -> None:
    replica, first, second = Replica(TIMES, 0.0, 0.0), job(), job(prompt=300, output=2)
    replica.add(first, 0.0)
    replica.add(second, 0.0)
    run_out(replica)
    # Three steps of a chunk of 100 tokens, in which the first gets a token each.
    assert second.first_token - first.first_token == pytest.approx(0.3 + 3 * 0.012)
    assert first.finished > second.first_token + 6 * 0.012


def test_a_picture_in_the_tower_stalls_who_decodes_beside_it() -> None:
    replica, first, second = Replica(TIMES, 0.0, 0.0), job(), job(encode=1.0)
    replica.add(first, 0.0)
    replica.add(second, 0.0)
    run_out(replica)
    assert first.finished - first.first_token > 1.0


def test_who_has_no_seat_waits() -> None:
    replica, jobs = Replica(TIMES, 0.0, 0.0), [job() for _ in range(3)]
    for one in jobs:
        replica.add(one, 0.0)
    assert len(run_out(replica)) == 3
    assert jobs[2].first_token > jobs[0].finished


def test_replicas_start_late_and_drain_before_they_stop() -> None:
    fleet = Fleet(TIMES, start_seconds=30.0)
    fleet.scale(2, 0.0)
    assert fleet.ready(29.0) == []
    busy = fleet.ready(30.0)[0]
    busy.add(job(), 30.0)
    fleet.scale(1, 31.0)
    assert fleet.replicas == [busy]
    assert fleet.replica_seconds(0.0, 41.0) == 31.0 + 41.0
    assert fleet.replica_seconds(35.0, 41.0) == 6.0


@pytest.mark.parametrize(
    ("replicas", "total", "wanted"),
    [(4, 4.2, 4), (4, 6.0, 6), (1, 40.0, 5), (10, 40.0, 20), (2, 0.0, 2)],
    ids=["within tolerance", "in proportion", "four more at once", "or twice as many", "not down at once"],
)
def test_the_autoscaler_steps_as_hpa_does(replicas: int, total: float, wanted: int) -> None:
    scaler = Autoscaler(1.0)
    scaler.desired(-15.0, replicas, float(replicas))
    assert scaler.desired(0.0, replicas, total) == wanted


def test_it_scales_down_after_the_window_and_only_to_its_highest_wish() -> None:
    scaler = Autoscaler(1.0)
    for now, total in ((0.0, 8.0), (15.0, 3.0), (30.0, 5.0), (45.0, 2.0)):
        assert scaler.desired(now, 8, total) == 8
    assert scaler.desired(316.0, 8, 2.0) == 5
    assert scaler.desired(345.0, 5, 2.0) == 2


@pytest.mark.parametrize("kind", ["aggregated, utilisation", "EPD, own signals"])
def test_every_request_of_a_trace_is_answered_once(kind: str) -> None:
    arrivals = trace(TraceShape(seconds=700.0), seed=1)
    simulation = Simulation(Policy(kind, (256.0, 4.0) if "own" in kind else (0.6,)), TIMES, Limits())
    outcome = simulation.run(arrivals)
    answered = [one.arrival for one in simulation.done]
    assert sorted(answered, key=lambda one: one.time) == arrivals
    assert 0 <= outcome.attainment <= 1
    assert outcome.replica_hours > 0


def test_a_trace_repeats_and_its_pictures_come_and_go() -> None:
    shape = TraceShape(seconds=4000.0)
    arrivals = trace(shape, 3)
    assert arrivals == trace(shape, 3)
    shares = [
        sum(one.media > 0 for one in part) / len(part)
        for part in ([a for a in arrivals if k * 800 <= a.time < (k + 1) * 800] for k in range(5))
    ]
    assert shares[2] > 0.6 > 0.3 > shares[0]
