"""Compiling functions into few kernels, where that is wanted and works; elsewhere they run as they are."""

from collections.abc import Callable
from typing import Any

import torch

_RECOMPILES = 64  # of one function: kinds of layers times shapes of micro-batches


class Compiler:
    """Compiles functions, as long as that works. One for all that a run compiles."""

    def __init__(self, enabled: bool, backend: str = "inductor") -> None:
        self.enabled = enabled
        self.backend = backend
        self.problem = ""  # why something is not compiled after all
        self._told = False
        if enabled:
            from torch._dynamo import config

            config.trace_autograd_ops = True  # layers' backward calls torch.autograd.grad
            config.recompile_limit = max(config.recompile_limit, _RECOMPILES)

    def take_problem(self) -> bool:
        """Whether there is a problem that was not asked for before."""
        new, self._told = bool(self.problem) and not self._told, bool(self.problem)
        return new

    def compiled(self, function: Callable[..., Any], dynamic: bool, pure: bool = True) -> "Compiled":
        return Compiled(self, function, dynamic, pure)


class Compiled:
    """A function that is compiled at its first call. `works` is False once it has to run as it is.

    pure: it changes none of its arguments, so it may be run again whatever went wrong; another one only where compiling it failed.
    """

    def __init__(self, compiler: Compiler, function: Callable[..., Any], dynamic: bool, pure: bool) -> None:
        self._pure = pure
        self._compiler = compiler
        self._plain = function
        self._fast = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler.backend) if compiler.enabled else function
        self.works = compiler.enabled

    def __call__(self, *args: Any) -> Any:
        if not self.works:
            return self._plain(*args)
        try:
            return self._fast(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler stumbles over, the function itself does the same work
            if not self._pure and not _is_compilers(error):
                raise
            self.works = False
            self._compiler.problem = self._compiler.problem or _short(error)
            return self._plain(*args)


def _is_compilers(error: Exception) -> bool:
    """Whether nothing has run yet."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__ + ":", *lines[:2]])[:300]
