"""A server that forks processes which have torch and Terra imported already: their imports take 6 s."""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_loaded: list[tuple[str, ...]] = []


def forkserver_with(*modules: str) -> ForkServerContext:
    """Give the context of a server that has imported these modules.

    A process has one server, which ignores modules that are named after its start, and passes over those that it does
    not find: it has not pytest's path. So a server that another test has started ends first.
    """
    context = multiprocessing.get_context("forkserver")
    if _loaded != [modules]:
        forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
        _loaded[:] = [modules]
        context.set_forkserver_preload(list(modules))
    return context
