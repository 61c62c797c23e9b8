"""`strongroom demo`: the main job on a real engine, each step asserted (docs/demo.md)."""
