"""What an identity is made of: artefacts, documents and their versions."""
