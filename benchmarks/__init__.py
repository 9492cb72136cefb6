"""Measurements of speed and memory: ratios within one run, interleaved, printed with their method.

``make bench`` runs all of them. They are no tests: machines differ, and a shared one is noisy.
"""
