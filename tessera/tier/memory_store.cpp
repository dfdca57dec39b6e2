namespace tessera::tier {}
