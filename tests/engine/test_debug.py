"""The debug switch."""

import pytest

from megatrain.engine.debug import MODES, Debug, read_debug
from megatrain.engine.device import make_device
from megatrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", Debug()),
        ("poison", Debug(poison=True)),
        (" sync , delay,", Debug(sync=True, delay=True)),
        (",".join(MODES), Debug(True, True, True)),
    ],
)
def test_modes_are_read_from_the_environment(text: str, wanted: Debug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_DEBUG", text)
    assert read_debug() == wanted
    assert make_device("cpu").debug == wanted


def test_a_text_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_DEBUG", "poison")
    assert read_debug("sync") == Debug(sync=True)
    assert read_debug("") == Debug()
    monkeypatch.delenv("MEGATRAIN_DEBUG")
    assert read_debug() == Debug()


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="trase") as caught:
        read_debug("poison,trase")
    assert "poison" in caught.value.hint
