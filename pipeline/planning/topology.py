from pipeline.planning.planner import Topology

__all__ = ["Topology"]
