"""What rendering takes from the cluster and the chart: values only, so that it stays pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServedVersions:
    """The group versions that the API server serves: of each group the newest one known here."""

    autoscaling: str = "autoscaling/v2"
    """Or `autoscaling/v2beta2`, whose shape is the same."""
    policy: str = "policy/v1"
    """Or `policy/v1beta1`."""
    discovery: str = "discovery.k8s.io/v1"
    """Or `discovery.k8s.io/v1beta1`. No child is of this group; the proxy reads it."""
    keda: str | None = None
    """`keda.sh/v1alpha1` where KEDA is installed."""


@dataclass(frozen=True)
class Images:
    """The images used where the resource names none: the chart's values."""

    engine: str
    """The native engine's."""
    proxy: str
    """The proxy's."""
    vllm: str | None
    """vLLM's with our connector in it, where the chart has one."""
    pull_policy: str = "IfNotPresent"
    """`Always`, `IfNotPresent` or `Never`."""
    pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, which must exist in the resource's namespace."""


@dataclass(frozen=True)
class RenderContext:
    """Everything besides the resource that the manifests depend on."""

    versions: ServedVersions
    images: Images
    operator_namespace: str | None = None
    """Where the operator's pods are; None where it does not know, because it runs outside a cluster."""
    prometheus_address: str | None = None
    """Where KEDA finds Prometheus; None where nobody has said."""
