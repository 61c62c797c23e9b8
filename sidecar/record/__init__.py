"""What is on record: accesses in the durable spool, operational events, the reasons of both."""
