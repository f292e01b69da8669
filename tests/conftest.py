def pytest_addoption(parser):
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="tests/bridge/test_matrix.py: run every layout with every loss implementation, and "
        "write the result into docs/parallelism.md",
    )
