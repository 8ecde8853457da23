"""Planners of the stages that give samples."""

from __future__ import annotations

from pipeline.planning.planner import Planner
from pipeline.planning.shapes import SampleShape
from pipeline.planning.topology import Topology
from stages.data.chat import ChatData
from stages.data.stream import StreamData
from stages.data.text import TextData


class DocumentsPlanner(Planner[TextData | StreamData]):
    """Planner of `data.text` and `data.stream`: blocks of equal length."""

    def forecast(self, topology: Topology) -> SampleShape:
        stage = self.stage
        return SampleShape(length=stage.sequence_length, packed=stage.documents_apart)


class ChatPlanner(Planner[ChatData]):
    """Planner of `data.chat`: samples of at most that length, several in one where they are
    packed."""

    def forecast(self, topology: Topology) -> SampleShape:
        return SampleShape(length=self.stage.sequence_length, packed=self.stage.packing)
