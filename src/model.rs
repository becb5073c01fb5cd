//! What MODEL means: `demo`, a folder or file, a name in nq's model folder, or a hub id.
