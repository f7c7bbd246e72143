"""When groups are gathered, freed and reduced: decisions only, no torch, no communication."""
