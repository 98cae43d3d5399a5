"""The streaming engine: tiers, streams, schedule, optimizer, trainer, checkpoint."""
