"""Destinations of metrics: the section `[track]` and the interface of trackers."""

from forge_trainer.track.base import Tracker as Tracker
from forge_trainer.track.config import TrackConfig as TrackConfig
from forge_trainer.track.config import WandbConfig as WandbConfig

__all__ = ["TrackConfig", "Tracker", "WandbConfig"]
