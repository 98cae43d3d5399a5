"""Compiled layers compute what layers compute, and a compiler that fails costs nothing but its speed."""

import pytest
import torch

from megatrain.models.compiler import Compiler
from megatrain.models.template import Template
from tests.models.test_template import call_of, gradients, real_layers, views_of
from tests.parity import skeleton


def test_a_function_that_cannot_be_compiled_runs_as_it_is() -> None:
    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        print("dynamo does not know what to do with this")
        return left + float(right.sum().item())

    compiler = Compiler(enabled=True)
    add_fast = compiler.compiled(add, dynamic=False)
    assert add_fast(torch.ones(2), torch.ones(2)).tolist() == [3.0, 3.0]
    assert not add_fast.works
    assert compiler.problem
    assert [compiler.take_problem(), compiler.take_problem()] == [True, False], "told once"


def test_what_changes_its_arguments_is_not_run_again_after_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(total: torch.Tensor) -> None:
        total.add_(1)

    def breaks_off(total: torch.Tensor) -> None:
        total.add_(1)
        raise RuntimeError("a kernel could not be launched")

    compiler = Compiler(enabled=True)
    function = compiler.compiled(add, dynamic=False, pure=False)
    monkeypatch.setattr(function, "_fast", breaks_off)
    total = torch.zeros(())
    with pytest.raises(RuntimeError, match="could not be launched"):
        function(total)
    assert float(total) == 1
    assert compiler.problem == ""


def test_what_changes_its_arguments_runs_as_it_is_where_compiling_fails() -> None:
    def add(total: torch.Tensor) -> None:
        print("dynamo does not know what to do with this")
        total.add_(1)

    function = Compiler(enabled=True).compiled(add, dynamic=False, pure=False)
    total = torch.zeros(())
    function(total)
    assert float(total) == 1
    assert not function.works


def test_memory_that_is_missing_is_no_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    compiler = Compiler(enabled=True)
    function = compiler.compiled(lambda: None, dynamic=False)
    monkeypatch.setattr(function, "_fast", full)
    with pytest.raises(torch.OutOfMemoryError):
        function()
    assert function.works


def test_compiled_layers_compute_what_layers_compute() -> None:
    family = "qwen3"
    compiler = Compiler(enabled=True, backend="aot_eager")  # traced and differentiated as for a GPU, without its kernels
    template, layers = Template(skeleton(family).layers[0], compiler), real_layers(family)
    hidden = torch.randn(1, 6, 64)
    for index in (1, 2):
        layer, call = layers[index], call_of(family)
        args, kwargs = call.with_hidden(hidden)
        torch.testing.assert_close(template.forward(views_of(layer), index, call, hidden), layer(*args, **kwargs))
        found = template.backward(
            views_of(layer), index, call, hidden.clone().requires_grad_(), list(layer.parameters()), torch.ones_like(hidden)
        )
        for new, wanted in zip(found, gradients(layer, family, hidden.clone()), strict=True):
            torch.testing.assert_close(new, wanted)
    assert compiler.problem == ""
    assert template._forward.works
    assert template._backward.works
