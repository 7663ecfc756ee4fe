"""Runs one instance until it is told to stop."""

import logging
import os

import uvicorn

from epd_engine import logs
from epd_engine.config import EngineConfig
from epd_engine.ec_transfer.config import ECConfigError
from epd_engine.engine import Engine
from epd_engine.kv_transfer.config import KVConfigError
from epd_engine.loop import EngineLoop
from epd_engine.machine.allocator import keep_freed_memory
from epd_engine.machine.device import DeviceError
from epd_engine.models.checkpoint import CheckpointError
from epd_engine.server.app import Service, create_app
from epd_engine.server.drain import Drain, DrainingServer

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 30


def serve(config: EngineConfig, host: str, port: int, drain_timeout: int, log_level: str) -> int:
    """Listens at once, loads the weights meanwhile, ends by SIGTERM or SIGINT; returns the exit status.

    Told to end, it finishes what it has begun within `drain_timeout` seconds; what is not done then, or when
    it is told once more, ends with an error. While it loads there is nothing to finish.
    """
    logs.configure(log_level)
    keep_freed_memory()
    loop, drain = EngineLoop(lambda: Engine(config)), Drain(drain_timeout)
    service = Service(config, loop, drain)

    def stop() -> None:
        server.should_exit = True

    def end_all() -> None:
        log.warning("told to end; %d requests are not done in time", loop.num_requests)
        loop.end_all()
        server.cut_off_later()

    drain.on_over = end_all
    server = DrainingServer(
        uvicorn.Config(
            create_app(service, stop),
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ),
        drain,
    )
    status = 0
    try:
        server.run()
    except SystemExit as refused:  # such as a port that is taken, which uvicorn has logged
        status = refused.code if isinstance(refused.code, int) else 1
    if loop.is_loading:
        log.info("ended while loading")
        logging.shutdown()
        os._exit(status)  # the interpreter's own end would stop the thread in the middle of a library's code
    loop.join()  # it may have been loading a moment ago
    if status or loop.failure is None:
        return status
    if isinstance(loop.failure, CheckpointError | DeviceError | ECConfigError | KVConfigError):
        log.error("%s", loop.failure)
    else:
        log.error("the engine ended by an error", exc_info=loop.failure)
    return 1
