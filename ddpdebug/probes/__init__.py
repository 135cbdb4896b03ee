"""Look at the user's objects on the training thread and note what they see. Probes never judge and never raise."""
