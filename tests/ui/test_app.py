"""app.py: its arguments, and a start that fails says why."""

import subprocess
import sys
from pathlib import Path

import app


def test_the_workspace_comes_from_the_argument_or_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRAIN_WORKSPACE", str(tmp_path / "from-environment"))
    assert app.parse([]).workspace == tmp_path / "from-environment"
    assert app.parse(["--workspace", "here"]).workspace == Path("here")
    monkeypatch.delenv("MEGATRAIN_WORKSPACE")
    assert app.parse([]).workspace == Path(app.DEFAULT_WORKSPACE)
    assert app.parse([]).host == "127.0.0.1"


def test_listening_elsewhere_without_a_password_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("MEGATRAIN_PASSWORD", raising=False)
    assert app.main(["--workspace", str(tmp_path), "--host", "0.0.0.0", "--no-browser"]) == 1
    assert "Set a password" in capsys.readouterr().err


def test_a_workspace_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert app.main(["--workspace", str(tmp_path / "file" / "below"), "--smoke"]) == 1
    assert capsys.readouterr().err.startswith("Error: ")


def test_smoke_builds_every_page_and_loads_no_torch(tmp_path):
    code = "import sys, app; status = app.main(sys.argv[1:]); assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(status)"
    arguments = [sys.executable, "-c", code, "--smoke", "--workspace", str(tmp_path)]
    ended = subprocess.run(arguments, capture_output=True, text=True, cwd=Path(app.__file__).parent)
    assert ended.returncode == 0, ended.stderr
    assert "Every page was built." in ended.stdout
