"""``ds.moe``: metrics and plots of a trace, as methods of the Dataset."""
