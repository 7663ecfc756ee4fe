"""The resource itself: `EPDDeployment`."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from .base import Annotations, FreeObject, Labels, Name, ObjectName, Part, Word
from .names import child_name
from .status import Status
from .store import ECStore, KVTransfer, KVTransferType, SharedMemory, SharedStorage
from .workload import Proxy, Roles

GROUP = "epd.dev"
VERSION = "v1alpha1"
KIND = "EPDDeployment"
MODELS_PATH = "/models"
"""Where pods see the claim that holds the model."""


class TokenSecret(Part):
    """The key of a Secret that holds a hub token."""

    name: ObjectName
    """Name of the Secret."""
    key: Word = "token"
    """Key in it."""


class Model(Part):
    """The model that is served."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    """A path, which begins with `/`, `./` or `../`, or else a hub id such as `Qwen/Qwen2.5-VL-3B-Instruct`.
    A relative path starts at this document for `epd up`, in a pod at `claim` or else at the image's working
    directory."""
    revision: Word | None = None
    """Commit, tag or branch of a hub id."""
    served_name: Word | None = None
    """The name that clients ask for; a path's last part, or the hub id, where absent."""
    claim: ObjectName | None = None
    """Claim that holds the model, mounted read-only at /models; there a relative `source` starts
    (pods only)."""
    cache_claim: ObjectName | None = None
    """Claim that keeps downloaded models (pods only)."""
    token_secret: TokenSecret | None = None
    """Token for the hub (pods only)."""

    @property
    def is_path(self) -> bool:
        """Whether `source` is a path rather than a hub id."""
        return self.source.startswith(("/", "./", "../"))

    @property
    def name(self) -> str:
        """The name that clients ask for."""
        if self.served_name is not None:
            return self.served_name
        return self.source.rstrip("/").rpartition("/")[2] if self.is_path else self.source

    @model_validator(mode="after")
    def _revision_of_a_hub_id(self) -> Self:
        if self.revision is not None and self.is_path:
            raise PydanticCustomError("revision", "`revision` has no meaning where `source` is a path")
        return self

    @model_validator(mode="after")
    def _lies_in_its_claim(self) -> Self:
        if self.claim is not None and (
            not self.source.startswith(("./", f"{MODELS_PATH}/")) or ".." in self.source
        ):
            raise PydanticCustomError(
                "model_claim",
                "with `claim`, `source` must be a path in it, such as `./my-model` or `{path}/my-model`",
                {"path": MODELS_PATH},
            )
        return self


class Engine(Part):
    """What runs the model."""

    type: Literal["native", "vllm"] = "native"
    """This project's own engine, or vLLM with this project's EC connector."""
    image: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """Container image; that of this release where absent (pods only). One of vLLM must have the connector in
    it: images/engine-vllm builds one."""


class Spec(Part):
    """What is wanted."""

    model: Model
    """The model that is served."""
    engine: Engine = Engine()
    """What runs the model."""
    roles: Roles
    """The roles: an encoder, and `pd`, or `prefill` and `decode`."""
    ec_store: ECStore = Field(default=ECStore.model_validate({"sharedStorage": {}}))
    """Where encoder output waits for its readers."""
    kv_transfer: KVTransfer | None = None
    """How prefill hands its KV to decode."""
    proxy: Proxy = Proxy()
    """The one address that clients talk to."""
    paused: bool = False
    """The operator leaves everything as it is."""

    @property
    def kv_transfer_type(self) -> KVTransferType | None:
        """How prefill hands its KV to decode; None where one role does both."""
        if self.roles.pd is not None:
            return None
        if self.kv_transfer is not None and self.kv_transfer.type is not None:
            return self.kv_transfer.type
        has_files = self.ec_store.shared_storage is not None and self.engine.type == "native"
        return "sharedStorage" if has_files else "nixl"

    @model_validator(mode="after")
    def _kv_has_two_ends(self) -> Self:
        if self.kv_transfer is not None and self.roles.pd is not None:
            raise PydanticCustomError(
                "kv", "`kvTransfer` has no meaning with `pd`: it joins `prefill` and `decode`"
            )
        return self

    @model_validator(mode="after")
    def _vllm_has_connectors(self) -> Self:
        if self.engine.type != "vllm":
            return self
        if self.ec_store.shared_storage is None:
            raise PydanticCustomError(
                "vllm_store",
                "`ecStore` needs files with `engine.type: vllm`, alone or after memory: give `sharedStorage`",
            )
        if self.ec_store.write == "back":
            raise PydanticCustomError(
                "vllm_write", "`ecStore.write` must be through with `engine.type: vllm`, or absent"
            )
        if self.kv_transfer_type == "sharedStorage":
            raise PydanticCustomError(
                "vllm_kv",
                "`kvTransfer.type` must be nixl with `engine.type: vllm`, or absent, which is the same",
            )
        return self


class Metadata(Part):
    """The standard metadata of a Kubernetes object."""

    name: Name
    """Name of the resource; its children are called `<name>-<role>`."""
    namespace: Name | None = None
    """Namespace of the resource."""
    labels: Labels = Field(default={})
    """Labels of the resource."""
    annotations: Annotations = Field(default={})
    """Annotations of the resource."""
    uid: Word | None = None
    """Set by the API server."""
    resource_version: Word | None = None
    """Set by the API server."""
    generation: Annotated[int, Field(ge=0)] | None = None
    """Set by the API server."""
    creation_timestamp: Word | None = None
    """Set by the API server."""
    deletion_timestamp: Word | None = None
    """Set by the API server."""
    deletion_grace_period_seconds: Annotated[int, Field(ge=0)] | None = None
    """Set by the API server."""
    owner_references: list[FreeObject] = Field(default=[], max_length=64)
    """Objects that own this one."""
    finalizers: list[Word] = Field(default=[], max_length=64)
    """Names that hold back deletion; this project sets none."""
    managed_fields: list[FreeObject] = Field(default=[], max_length=256)
    """Set by the API server."""


class EPDDeployment(Part):
    """A multimodal model served by encoders and language-model instances of their own."""

    api_version: Literal["epd.dev/v1alpha1"]
    """Always epd.dev/v1alpha1."""
    kind: Literal["EPDDeployment"]
    """Always EPDDeployment."""
    metadata: Metadata
    """The standard metadata of a Kubernetes object."""
    spec: Spec
    """What is wanted."""
    status: Status | None = None
    """What the operator saw."""

    @model_validator(mode="after")
    def _others_claims(self) -> Self:
        """The operator's own claim is deleted when nothing asks for it, and `existingClaim` does not."""
        own = {child_name(self.metadata.name, kind.claim_suffix) for kind in (SharedStorage, SharedMemory)}
        for name, tier in self.spec.ec_store.tiers.items():
            if tier.existing_claim in own:
                raise PydanticCustomError(
                    "own_claim",
                    "{claim} is the name of the claim that the operator makes for this resource; leave "
                    "`existingClaim` out to use that one, or name another",
                    {"claim": tier.existing_claim, "at": ("spec", "ecStore", name, "existingClaim")},
                )
        return self
