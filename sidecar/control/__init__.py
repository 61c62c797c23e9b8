"""The side of `strongroom.control` that asks: leases, the log's position, the gate."""
