"""Hardware profiles: data only, one TOML file a machine; README.md states the schema."""
