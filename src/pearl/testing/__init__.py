"""In-process fakes and contract suites for every port, for use in tests of your own engines, environments and recipes.

The fakes are asyncio code on the running loop's clock: no threads, no wall clock, no global randomness, so they run on
a virtual-time loop as well. Import from the modules: `pearl.testing.engine`, ... The suites in
`pearl.testing.contracts` need pytest.
"""
