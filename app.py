"""Starts the dashboard: python app.py [--host H] [--port P] [--workspace FOLDER] [--no-browser] [--smoke]."""

import argparse
import os
import sys
from pathlib import Path

DEFAULT_WORKSPACE = "~/megatrain-workspace"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line, with defaults from the environment."""
    parser = argparse.ArgumentParser(prog="app.py", description="MegaTrain dashboard: full-parameter training of language models.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; anything but this computer needs MEGATRAIN_PASSWORD")
    parser.add_argument("--port", type=int, default=None, help="port to listen on; the first free one from 7860 when left out")
    workspace = os.environ.get("MEGATRAIN_WORKSPACE") or DEFAULT_WORKSPACE
    parser.add_argument("--workspace", type=Path, default=Path(workspace), help="folder of runs, models and caches (MEGATRAIN_WORKSPACE)")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser window")
    parser.add_argument("--smoke", action="store_true", help="build every page and exit")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Build the dashboard and serve it until it is stopped."""
    options = parse(arguments)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    from megatrain.errors import MegaTrainError
    from ui.dashboard import build
    from ui.server import launch, refuse_open_door

    password = os.environ.get("MEGATRAIN_PASSWORD")
    workspace = options.workspace.expanduser().resolve()
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        refuse_open_door(options.host, password)
        demo = build(workspace)
        if options.smoke:
            print("Every page was built.")
            return 0
        address = launch(demo, options.host, options.port, password, browser=not options.no_browser)
        print(f"MegaTrain is at {address} (workspace {workspace}); Ctrl+C ends the dashboard, not the runs.", flush=True)
        demo.block_thread()
    except (MegaTrainError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
