"""Experts and dense weights, read from the model file into memory of our own."""

from bmoe_lab.streaming.arena import Arena
from bmoe_lab.streaming.budget import AutoBudget, auto_budget, memory_available
from bmoe_lab.streaming.dense import DenseWeights
from bmoe_lab.streaming.header import Header, TensorInfo, read_header
from bmoe_lab.streaming.layout import ModelLayout, Shard, TensorEntry, read_layout
from bmoe_lab.streaming.probe import Bandwidth, probe_bandwidth
from bmoe_lab.streaming.reader import Job, ReadCancelled, Reader
from bmoe_lab.streaming.streamer import Costs, StackGroup, Streamer, StreamLoad

__all__ = [
    "Arena",
    "AutoBudget",
    "Bandwidth",
    "Costs",
    "DenseWeights",
    "Header",
    "Job",
    "ModelLayout",
    "ReadCancelled",
    "Reader",
    "Shard",
    "StackGroup",
    "StreamLoad",
    "Streamer",
    "TensorEntry",
    "TensorInfo",
    "auto_budget",
    "memory_available",
    "probe_bandwidth",
    "read_header",
    "read_layout",
]
