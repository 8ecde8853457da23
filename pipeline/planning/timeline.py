from pipeline.planning.strategy import *
from pipeline.planning.strategy import Held
