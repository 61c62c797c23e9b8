"""`strongroom verify`: a revocation's certificate, offline."""
