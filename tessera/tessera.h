// Everything a program that trains needs: include this one.
#pragma once

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/runtime.h"
#include "tessera/engine/unit.h"
