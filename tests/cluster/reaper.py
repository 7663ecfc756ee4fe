"""Process 1 of a cluster's namespaces: it keeps them alive, and takes in what others leave behind.

Killing it ends everything inside, mounts and network included; the kernel sees to that.
"""

import os
import signal


def main() -> None:
    """Reaps orphans until killed."""
    # Blocked and waited for, so that no child can end unseen between a look and the next wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main()
