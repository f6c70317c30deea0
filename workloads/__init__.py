"""Workloads: traces from model configurations, captured modules, foreign files and small synthetic families."""

from workloads.capture import capture, capture_from_reference
from workloads.cnn import cnn, cnn_names
from workloads.families import Config
from workloads.importers.any_format import load_trace
from workloads.models import model_names, read_config
from workloads.stacks import with_stack
from workloads.steps import training_step
from workloads.synthetic import chain, random_dag, unet, uniform_chain, w1
from workloads.transformer import transformer
from workloads.varied import joined, varied_lengths
from workloads.zeros import with_zeros

__all__ = [
    "Config",
    "capture",
    "capture_from_reference",
    "chain",
    "cnn",
    "cnn_names",
    "joined",
    "load_trace",
    "model_names",
    "random_dag",
    "read_config",
    "training_step",
    "transformer",
    "unet",
    "uniform_chain",
    "varied_lengths",
    "w1",
    "with_stack",
    "with_zeros",
]
