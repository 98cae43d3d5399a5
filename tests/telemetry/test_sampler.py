"""The sampling thread: means and maxima, missing readings, its end, and that its death is told."""

import math
import threading

import pytest

from megatrain.telemetry.sampler import Sampler, summarise


def test_mean_and_maximum_per_key_and_united_bit_masks():
    values = summarise({"a": [1.0, 3.0], "gpu0_throttle": [4, 0, 1]})
    assert values == {"a_mean": 2.0, "a_max": 3.0, "gpu0_throttle_max": 5}


def test_samples_are_published_and_missing_ones_are_absent():
    published = []
    enough = threading.Event()
    numbers = iter(range(1000))

    def reader():
        return {"x": float(next(numbers)), "never": None, "nan": math.nan}

    def publish(time_s, values):
        published.append(values)
        if len(published) >= 2:
            enough.set()

    sampler = Sampler([reader, lambda: {"y": 1.0}], publish, pytest.fail, sample_s=0.005, publish_s=0.02).start()
    assert enough.wait(10)
    sampler.stop()
    assert not sampler.alive
    for values in published:
        assert set(values) == {"x_mean", "x_max", "y_mean", "y_max"}
        assert values["x_mean"] <= values["x_max"]
    assert published[0]["x_max"] < published[1]["x_mean"]


def test_the_running_second_is_published_at_the_end():
    published = []
    read = threading.Event()

    def reader():
        read.set()
        return {"x": 1.0}

    sampler = Sampler([reader], lambda time_s, values: published.append(values), pytest.fail, sample_s=60, publish_s=60).start()
    assert read.wait(10)
    sampler.stop()
    assert published == [{"x_mean": 1.0, "x_max": 1.0}]


@pytest.mark.parametrize("place", ["reader", "publish"])
def test_its_death_is_told_and_stop_still_returns(place):
    told = []
    done = threading.Event()

    def breaks(*_args):
        raise OSError("gone")

    def failed(error):
        told.append(error)
        done.set()

    readers = [breaks] if place == "reader" else [lambda: {"x": 1.0}]
    sampler = Sampler(readers, breaks if place == "publish" else pytest.fail, failed, sample_s=0.001, publish_s=0.0).start()
    assert done.wait(10)
    sampler.stop()
    assert str(told[0]) == "gone"
    assert not sampler.alive
