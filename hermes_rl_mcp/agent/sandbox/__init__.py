"""Places where the commands of one task run and its files lie: ``local`` and ``docker``, made by ``factory``."""
