"""Starts a cluster, says so on standard output, and stops it when standard input ends. For tests to kill."""

import json
import sys

from tests.cluster.local import LocalCluster
from tests.cluster.slots import Slot

slot = Slot.take_free()
print(json.dumps({"slot": slot.number}), flush=True)
with LocalCluster.start(with_node=sys.argv[1] == "node", slot=slot):
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.read()
