"""The section `[expert_parallel]`: how rows travel to the experts of other ranks. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from forge_config import ALL_KEYS, Config, Meta, Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


class DispatcherConfig(Config):
    """Interface of `[expert_parallel]`."""

    free_keys = (ALL_KEYS,)

    def require(self, ranks: int, experts: int, groups: int = 1) -> None:
        """Check that layers of `experts` experts can be served by `mesh.ep` ranks in this way.

        Args:
            ranks: number of ranks that share the experts.
            experts: number of experts of a layer.
            groups: number of groups of experts if each token chooses among some of the groups; 1 otherwise.

        Raises:
            ValueError: they cannot.
        """

    def build(self, mesh: DeviceMesh) -> Callable[..., Any]:
        """Build the replacement of `dispatch` in every layer of experts. Collective.

        It is called as (experts, rows, ends, meanwhile) -> rows; see `forge_parallel.dispatch.AllToAll`.

        Args:
            mesh: the axis `ep` alone, in the order of the experts.
        """
        raise NotImplementedError


dispatchers = Registry("expert_parallel", DispatcherConfig, default="all_to_all")


@dispatchers.register("all_to_all")
class AllToAllConfig(DispatcherConfig):
    """One all-to-all to the experts, one back.

    Attributes:
        chunks: number of parts in which the experts of a rank are served, a divisor of their number. The rows
            of one part travel while the part before is computed. Each part makes full-size gradients.
    """

    chunks: Annotated[int, Meta(ge=1)] = 1

    def require(self, ranks: int, experts: int, groups: int = 1) -> None:
        """See `DispatcherConfig.require`."""
        if ranks % groups and groups % ranks:
            raise ValueError(
                f"router.groups = {groups} and mesh.ep = {ranks}: a group of experts lies on some ranks in "
                "part, so tokens are sent to more of them than they need; let one be a multiple of the other"
            )
        if experts // ranks % self.chunks:
            raise ValueError(
                f"expert_parallel.chunks = {self.chunks} does not divide the {experts // ranks} experts of "
                f"each rank ({experts} over mesh.ep = {ranks}); use a divisor"
            )

    def build(self, mesh: DeviceMesh) -> Callable[..., Any]:
        """See `DispatcherConfig.build`."""
        from forge_parallel.dispatch import AllToAll

        return AllToAll(mesh.get_group(), mesh.size(), self.chunks)


@dispatchers.register("two_level")
class TwoLevelConfig(AllToAllConfig):
    """Inside of a node first, to the rank at the same place as the target; then from node to node.

    Each rank then sends one message to every other node instead of one to each of its ranks. The rows that
    arrive, and their order, are the same.

    Attributes:
        node_ranks: number of the `mesh.ep` ranks that are on one node.
    """

    node_ranks: Annotated[int, Meta(ge=2)]

    def require(self, ranks: int, experts: int, groups: int = 1) -> None:
        """See `DispatcherConfig.require`."""
        super().require(ranks, experts, groups)
        nodes, rest = divmod(ranks, self.node_ranks)
        if rest or nodes == 1:
            raise ValueError(
                f"expert_parallel.node_ranks = {self.node_ranks} does not cut mesh.ep = {ranks} ranks into "
                'several nodes of that many; use a smaller divisor, or type = "all_to_all"'
            )
        if groups > 1 and groups % nodes:
            raise ValueError(
                f"router.groups = {groups} on {nodes} nodes: a group lies on several nodes, so tokens are "
                "sent to more nodes than groups; use a multiple of the nodes"
            )

    def build(self, mesh: DeviceMesh) -> Callable[..., Any]:
        """See `DispatcherConfig.build`."""
        from forge_parallel.capabilities import unflatten
        from forge_parallel.dispatch import TwoLevel

        nodes = mesh.size() // self.node_ranks
        grid = unflatten(mesh, {"ep_node": nodes, "ep_local": self.node_ranks})
        inside, across = (grid[name].get_group() for name in ("ep_local", "ep_node"))
        return TwoLevel(inside, mesh.size(), self.chunks, across=across, nodes=nodes)
