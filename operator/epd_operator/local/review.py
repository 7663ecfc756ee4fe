"""Pure: what a valid deployment asks for that `epd up` cannot do on this machine."""

from collections.abc import Iterator

from ..api import EPDDeployment, Instance
from ..roles import roles_of


def refusals(deployment: EPDDeployment, *, own_store: bool) -> list[str]:
    """Why the deployment cannot run here: field, reason, way out. `own_store`: the user named a directory."""
    return [*_of_spec(deployment), *_of_store(deployment, own_store), *_of_workloads(deployment)]


def _of_spec(deployment: EPDDeployment) -> Iterator[str]:
    spec = deployment.spec
    if spec.paused:
        yield "spec.paused: is true, so there is nothing to start; remove it"
    if spec.kv_transfer_type == "sharedStorage" and spec.ec_store.shared_storage is None:
        yield "spec.kvTransfer.type: sharedStorage needs files: give `ecStore.sharedStorage`"


def _of_store(deployment: EPDDeployment, own_store: bool) -> Iterator[str]:
    store = deployment.spec.ec_store
    if store.shared_storage is None and own_store:
        yield "spec.ecStore: is in memory alone, so there are no files to keep; remove --store"
    if store.shared_storage is not None and store.shared_storage.existing_claim is not None and not own_store:
        yield (
            "spec.ecStore.sharedStorage.existingClaim: there are no claims on this machine; "
            "name a directory with --store DIR"
        )


def _of_workloads(deployment: EPDDeployment) -> Iterator[str]:
    roles = list(roles_of(deployment))
    for name, role in roles:
        if role.autoscaling is not None:
            yield f"spec.roles.{name}.autoscaling: `epd up` does not scale by load; give `replicas` instead"
        if role.replicas == 0:
            yield f"spec.roles.{name}.replicas: is 0, and a request needs at least 1"
    if deployment.spec.proxy.replicas not in (None, 1):
        yield "spec.proxy.replicas: `epd up` runs one proxy; remove it"
    workloads: tuple[tuple[str, Instance], ...] = (
        *((f"roles.{name}", role) for name, role in roles),
        ("ecStore.janitor", deployment.spec.ec_store.janitor),
        ("proxy", deployment.spec.proxy),
    )
    for path, workload in workloads:
        for index, variable in enumerate(workload.env):
            if variable.value_from is not None:
                yield (
                    f"spec.{path}.env[{index}].valueFrom: there is no cluster to take {variable.name} from; "
                    f"give `value` instead"
                )
