"""The same spec run as processes on this machine: what `epd up`, `ps`, `logs` and `down` do.

plan        pure: spec -> the processes to start
rundir      a deployment's run directory: its lock, and cleaning up after a killed run
state       what is running, as written for `epd ps`
process     one process: start, readiness, restarts, stop
supervisor  all of them, from start to stop
logs        prefixed log files and reading them
progress    what a person sees meanwhile
commands    the commands themselves
"""
