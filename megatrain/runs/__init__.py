"""Run folders, the worker process, and the supervisor that starts and finds workers."""
