namespace tessera::planner {}
