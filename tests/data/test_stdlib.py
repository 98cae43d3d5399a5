"""The standard library as the demo's data: what is taken of a function, and that pre-training and demo never share one."""

import textwrap
import zipfile

import pytest

from megatrain.data import stdlib
from megatrain.errors import DataError

SOURCE = '''
    import functools

    def add(a, b):
        """Return the sum.

            Of both.
        Nothing else.
        """
        return a + b

    class Box:
        @property
        def value(self):
            """The value."""
            return self._value

        def empty(self):
            """Nothing follows.

            Nothing at all.
            """

        class Inner:
            def plain(self):
                x = 1
                def nested():
                    return x
                return nested

    def short(): "On one line."; return 1

    def after():
        a = 1
        b = 2
        return a + b
'''


@pytest.fixture
def library(tmp_path):
    """A library with one module in a demo package, the same one outside, and files that are passed over."""
    demo, other = "email", "json"
    assert stdlib.is_demo_package(f"{demo}/x.py")
    assert not stdlib.is_demo_package(f"{other}/x.py")
    for package in (demo, other, "test"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "module.py").write_text(textwrap.dedent(SOURCE), "utf-8", newline="\n")
    (tmp_path / demo / "broken.py").write_text("def half(:", "utf-8")
    (tmp_path / demo / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n\f\ndef latin():\n    x = '\xe4\\d'\n    y = 1\n    return x\n")
    return tmp_path


def test_functions_are_taken_whole_and_in_order(library):
    found = list(stdlib.functions(library))
    names = ("add", "short", "after", "value", "empty", "plain")
    expected = [(f"{package}/module.py", name) for package in ("email", "json") for name in names]
    assert [(function.module, function.name) for function in found] == [("email/latin.py", "latin"), *expected]
    latin, add, _, _, value, _, plain = found[:7]
    assert latin.source == "def latin():\n    x = '\xe4\\d'\n    y = 1\n    return x"
    assert (latin.line, add.line) == (3, 4)
    assert add.docstring == "Return the sum.\n\n    Of both.\nNothing else."
    assert add.source.startswith("def add(a, b):\n    \"\"\"Return the sum.")
    assert add.code == "def add(a, b):\n    return a + b"
    assert value.code == "@property\ndef value(self):\n    return self._value"
    assert plain.docstring == ""
    assert plain.code == plain.source
    assert "nested" in plain.source


def test_a_function_that_only_has_a_docstring_has_no_code(library):
    codes = {function.name: function.code for function in stdlib.functions(library)}
    assert codes["empty"] == ""
    assert codes["short"] == ""
    assert codes["after"].startswith("def after():\n    a = 1")


def test_this_pythons_library_has_enough_of_both():
    root = stdlib.library_folder()
    named = {path.relative_to(root).as_posix(): path for path in stdlib.files(root)}
    assert not any("test" in module.split("/") for module in named)
    read = [module for module in named if stdlib.is_demo_package(module) or module.startswith("json/")]  # all would take seconds
    found = [function for module in read for function in stdlib.functions_of(named[module], module)]
    modules = {function.module for function in found}
    demo = {module for module in modules if stdlib.is_demo_package(module)}
    assert "asyncio/events.py" in demo
    assert "json/decoder.py" in modules - demo
    pairs = [function for function in found if function.module in demo and function.docstring and function.code]
    assert 800 < len(pairs) < 4000


def test_a_packed_library_is_refused_with_a_hint(tmp_path, monkeypatch):
    packed = tmp_path / "python311.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("ast.py", "")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(packed))
    with pytest.raises(DataError, match="not a folder"):
        next(stdlib.functions())
