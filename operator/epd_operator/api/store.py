"""Where tensors cross from one role to another: the EC store, and the transfer of KV."""

from decimal import Decimal
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .base import Duration, FreeObject, ObjectName, Part, Quantity, quantity_value
from .workload import Instance

_CAPACITY_SHARE = Decimal("0.9")


class ClaimTemplate(Part):
    """The PersistentVolumeClaim that the operator makes for the store."""

    size: Quantity = "10Gi"
    """Size of the volume; may only grow."""
    storage_class_name: ObjectName | None = None
    """Storage class; the cluster's default where absent. Immutable."""
    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]] = Field(
        default=["ReadWriteMany"], min_length=1, max_length=3
    )
    """ReadWriteMany, unless all roles run on one node. Immutable."""


class ClaimedStore(Part):
    """A store on a volume that pods mount through a claim."""

    claim_suffix: ClassVar[str]
    """What the name of the operator's own claim ends with."""

    claim_template: ClaimTemplate | None = None
    """A claim to be made; with all its defaults where neither this nor `existingClaim` is given."""
    existing_claim: ObjectName | None = None
    """Name of a claim that exists, which is used and never deleted."""
    capacity: Quantity | None = None
    """Bytes that entries may take together; nine tenths of the claim where absent."""

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that entries may take: as given, or nine tenths of the claim. None: known from the mount
        only."""
        if self.capacity is not None:
            return int(quantity_value(self.capacity))
        if self.existing_claim is not None:
            return None
        return int(quantity_value((self.claim_template or ClaimTemplate()).size) * _CAPACITY_SHARE)

    @model_validator(mode="after")
    def _one_claim(self) -> Self:
        if self.claim_template is not None and self.existing_claim is not None:
            raise PydanticCustomError("claim", "takes `claimTemplate` or `existingClaim`, not both")
        return self

    @model_validator(mode="after")
    def _capacity_fits(self) -> Self:
        if self.capacity is None:
            return self
        if quantity_value(self.capacity) <= 0:
            raise PydanticCustomError("capacity", "`capacity` must be more than 0")
        if self.existing_claim is None:
            size = (self.claim_template or ClaimTemplate()).size
            if quantity_value(self.capacity) > quantity_value(size):
                raise PydanticCustomError(
                    "capacity",
                    "`capacity` ({capacity}) must not be more than the claim's size ({size})",
                    {"capacity": self.capacity, "size": size},
                )
        return self


class SharedStorage(ClaimedStore):
    """Entries as files on a volume that all roles mount."""

    claim_suffix = "store"

    ttl: Duration | None = None
    """Entries not used for this long are deleted; kept while there is room where absent."""
    retention: Literal["Retain", "Delete"] = "Delete"
    """What happens to the operator's claim when the resource is deleted."""


class SharedMemory(ClaimedStore):
    """Entries in the memory of one node: a volume that is a tmpfs. Roles that use it are placed together."""

    claim_suffix = "store-memory"

    lease_timeout: Duration = "60s"
    """An entry taken by a reader that died is free again after this long."""


class Janitor(Instance):
    """Keeps the store within its capacity; there is one for each store."""


class ECStore(Part):
    """Where encoder output waits for its readers; with both, memory is the first tier."""

    shared_storage: SharedStorage | None = None
    """Files on a shared volume."""
    shared_memory: SharedMemory | None = None
    """The memory of one node."""
    write: Literal["through", "back"] | None = None
    """With both: an entry is in both before it counts as stored (`through`, the default), or in memory, from
    where it goes to the files later (`back`)."""
    janitor: Janitor = Janitor()
    """What keeps the store within its capacity."""

    @property
    def tiers(self) -> dict[str, ClaimedStore]:
        """The stores that there are, by their fields' names."""
        both = {"sharedStorage": self.shared_storage, "sharedMemory": self.shared_memory}
        return {name: tier for name, tier in both.items() if tier is not None}

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if self.shared_storage is None and self.shared_memory is None:
            raise PydanticCustomError(
                "store", "needs `sharedStorage`, `sharedMemory` or both (all defaults: `sharedStorage: {{}}`)"
            )
        return self

    @model_validator(mode="after")
    def _writes_to_two(self) -> Self:
        if self.write is not None and (self.shared_storage is None or self.shared_memory is None):
            raise PydanticCustomError(
                "write", "`write` has a meaning only with both `sharedStorage` and `sharedMemory`"
            )
        return self

    @model_validator(mode="after")
    def _a_claim_each(self) -> Self:
        storage, memory = self.shared_storage, self.shared_memory
        if storage is None or memory is None or storage.existing_claim is None:
            return self
        if storage.existing_claim == memory.existing_claim:
            raise PydanticCustomError(
                "claim",
                "`sharedStorage` and `sharedMemory` both name claim {claim}; each needs one of its own",
                {"claim": storage.existing_claim},
            )
        return self


KVTransferType = Literal["nixl", "sharedStorage"]


class KVTransfer(Part):
    """How prefill hands its KV to decode."""

    type: KVTransferType | None = None
    """NIXL (RDMA, shared memory, TCP), or files on the volume of `ecStore.sharedStorage`,
    which is the default where there is that volume."""
    extra_config: FreeObject = Field(default={}, max_length=64)
    """Options of the connector, by its own names."""
