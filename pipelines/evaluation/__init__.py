"""How the avatar is measured: probe, streams, measures, verdicts (`rtgen eval avatar`)."""
