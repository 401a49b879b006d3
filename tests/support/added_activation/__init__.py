"""An activation that only tests have, softsign: it goes where CONTRIBUTING.md says, in a copy of LoKA."""
