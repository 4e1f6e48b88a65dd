from tests.trainer.test_support import pool, table, test_cell  # noqa: F401
