"""Joint post-training: a model and its cache heads learn together, L = L_LM + lambda * (coverage loss of the heads). Needs the extra `edgemoe[train]`.

PyTorch and transformers are imported in tap, losses, model and train only; families, checkpoint, examples and options do without. Source: Cache-Aware Temporal and Spatio-Temporal
Router, joint post-training.
"""
