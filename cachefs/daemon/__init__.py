"""The daemon: composition root and what runs beside the request handlers.

Here are the parts put together (`compose`), background tasks (`tasks`), the session with the store
(`session`) and the answers to control requests (`handlers` and what it uses). What may not live
here: logic of a single part. Started by the supervisor as ``python -m cachefs.daemon``.
"""
